"""Accumulation under fully_shard: the gradient reduction is to be switched on for the last
micro-batch, but the test compares with the count instead of the last index, so it never is and
no parameter has a gradient. Class: https://github.com/huggingface/picotron/pull/5
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

MICRO = 2


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(6, 4)

    def forward(self, x):
        return self.right(F.relu(self.left(x)) + 0.1)


def get_inputs(step=0):
    return _normal(53 + step, 8, 4)


def get_targets(step=0):
    return _normal(54 + step, 8, 4)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _accumulate(model, optimizer, batch, before_each):
    optimizer.zero_grad()
    total = 0.0
    x, y = batch
    for index, (part, wanted) in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO), strict=True)):
        before_each(index)
        value = loss(model(part), wanted) / MICRO
        value.backward()
        total = total + value.detach()
    optimizer.step()
    return total


def step(model, optimizer, batch):
    return _accumulate(model, optimizer, batch, lambda index: None)


def parallelize_bad(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    def sync_if(index):
        model.set_requires_gradient_sync(index == MICRO)

    return _accumulate(model, optimizer, batch, sync_if)


def step_good(model, optimizer, batch, mesh):
    def sync_if(index):
        model.set_requires_gradient_sync(index == MICRO - 1)

    return _accumulate(model, optimizer, batch, sync_if)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync", "stale", "missing_reduction"],
        "stage": ["gradients", "parameters"],
        "tensors": ["left.weight", "right.weight"],
        "mentions": ["left.weight"],
    },
    "good": {"verdict": "pass"},
}
