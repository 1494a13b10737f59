"""One flat buffer for all gradients, packed in one order and unpacked in another: two layers of one
shape trade theirs. The twin unpacks as it packed.
Class: https://github.com/NVIDIA/Megatron-LM/pull/6500 (raw buffers with other offsets)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.out(x)


def get_inputs(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(9300 + step))


def get_targets(step=0):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(9330 + step))


def loss(output, targets):
    return F.smooth_l1_loss(output, targets)


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def parallelize_good(model, mesh):
    return model


def _train(model, optimizer, batch, mesh, order):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    params = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= mesh.size()
    for at, part in zip(order, flat.split([params[i].numel() for i in order]), strict=True):
        params[at].grad = part.view_as(params[at]).clone()
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, range(10))


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, [0, 1, 4, 3, 2, 5, 6, 7, 8, 9])


parallelize_bad = parallelize_good

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "gradients",
        "tensors": ["blocks.0.weight", "blocks.1.weight"],
        "mentions": ["change places"],
    },
    "good": {"verdict": "pass"},
}
