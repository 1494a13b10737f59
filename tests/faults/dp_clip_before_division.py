"""Accumulation: the summed gradient of four micro-batches is clipped and divided by four
afterwards, so clipping acts on a norm four times too large and the step is a quarter of the limit.
The twin divides first.
Class: https://github.com/huggingface/accelerate/issues/3877
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES, MAX_NORM = 4, 0.5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(4, 12)
        self.narrow = nn.Linear(12, 2)

    def forward(self, x):
        return self.narrow(F.hardswish(self.widen(x)))


def get_inputs(step=0):
    return 3 * torch.randn(16, 4, generator=torch.Generator().manual_seed(9200 + step))


def get_targets(step=0):
    return torch.randn(16, 2, generator=torch.Generator().manual_seed(9300 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def _train(model, optimizer, batch, before, after):
    optimizer.zero_grad()
    total = 0.0
    for x, wanted in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
        value = loss(model(x), wanted)
        value.backward()
        total = total + value.detach()
    for p in model.parameters():
        p.grad /= before
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    for p in model.parameters():
        p.grad /= after
    optimizer.step()
    return total / MICRO_BATCHES


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, MICRO_BATCHES, 1)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 1, MICRO_BATCHES)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, MICRO_BATCHES, 1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip", "factor"],
        "stage": ["gradients", "clipping"],
        "tensors": ["widen.weight", "widen.bias", "narrow.weight", "narrow.bias"],
        "mentions": ["4"],
    },
    "good": {"verdict": "pass"},
}
