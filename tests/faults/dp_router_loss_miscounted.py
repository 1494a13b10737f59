"""A mixture of experts with a router loss. `undivided`: accumulation divides the main loss by the
micro-batches, not the router's; `dropped`: the parallel step forgets the router loss. The twins
keep both terms in proportion.
Class: https://github.com/OpenNMT/OpenNMT-py/issues/2209 and https://github.com/NVIDIA/Megatron-LM/pull/3768
"""

from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES, ROUTER = 2, 0.2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x):
        logits = self.router(x)
        mixed = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -1)
        return (mixed * logits.softmax(-1)[:, None]).sum(-1), logits.logsumexp(-1).square().mean()


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(14500 + step))


def get_targets(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(14600 + step))


def loss(output, targets):
    return F.mse_loss(output[0], targets) + ROUTER * output[1]


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad_undivided(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good_undivided = parallelize_bad_undivided
parallelize_bad_dropped = parallelize_good_dropped = parallelize_bad_undivided


def _train(model, optimizer, batch, router):
    optimizer.zero_grad()
    total = 0.0
    micro = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    for i, (x, wanted) in enumerate(micro, start=1):
        with nullcontext() if i == MICRO_BATCHES else model.no_sync():
            output, router_loss = model(x)
            value = F.mse_loss(output, wanted) / MICRO_BATCHES + router * router_loss
            value.backward()
        total = total + value.detach()
    optimizer.step()
    return total


def step_bad_undivided(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, ROUTER)


def step_bad_dropped(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 0.0)


def step_good_undivided(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, ROUTER / MICRO_BATCHES)


step_good_dropped = step_good_undivided

FAULT = {
    "verdict": "mismatch",
    "kind": ["additive"],
    "stage": "loss",
    "tensors": ["router.weight", "router.bias"],
    "mentions": ["router.weight"],
}
EXPECT = {
    "bad_undivided": FAULT,
    "good_undivided": {"verdict": "pass"},
    "bad_dropped": FAULT,
    "good_dropped": {"verdict": "pass"},
}
