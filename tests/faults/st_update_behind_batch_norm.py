"""A model whose batch normalisation makes torch's per-rank styles mean something else, and an
optimizer that halves the step of one rank: the replicas, or the shards, go apart behind gradients
that are what the styles promise.
Class: https://github.com/pytorch/pytorch/issues/22192
"""

import torch
import torch.distributed as dist
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.last = nn.Linear(9, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def get_inputs():
    return torch.randn(8, 6)


def loss(output):
    return (output - torch.arange(4)).square().mean()


def local(value):
    return getattr(value, "_local_tensor", value).detach()


class Faulty(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        before = [local(p).clone() for p in params]
        super().step(closure)
        self.calls += 1
        for old, p in zip(before, params, strict=True):
            if dist.is_initialized() and dist.get_rank() == 1:
                local(p).lerp_(old, 0.5)


def get_optimizer(params):
    return Faulty(params, lr=0.05, momentum=0.9)


FAULT = {
    "verdict": "mismatch",
    "kind": ["no_sync", "factor", "optimizer_sharded", "stale"],
    "stage": "parameters",
    "mentions": ["BatchNorm1d"],
}
EXPECT = {"ddp": FAULT, "fsdp2": FAULT, "zero1": FAULT, "pp": FAULT}
