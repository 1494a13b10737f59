"""Gradient accumulation with an all-reduce of the running sum after each micro-batch: the first
micro-batch's gradient is summed twice over three ranks. The twin reduces once, at the end.
Class: https://github.com/deepspeedai/DeepSpeed/pull/6550 (accumulation in reduced buffers)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MICRO = 2


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(5, 7)
        self.upper = nn.Linear(7, 2)

    def forward(self, x, y):
        return F.mse_loss(self.upper(F.gelu(self.lower(x))), y, reduction="sum")


def get_inputs(step=0):
    return {"x": _normal(24 + step, 12, 5), "y": _normal(29 + step, 12, 2)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _accumulate(model, optimizer, batch, samples, after_each=lambda: None):
    optimizer.zero_grad()
    total = 0.0
    for x, y in zip(batch["x"].chunk(MICRO), batch["y"].chunk(MICRO), strict=True):
        value = model(x, y) / samples
        value.backward()
        after_each()
        total = total + value.detach()
    return total


def step(model, optimizer, batch):
    total = _accumulate(model, optimizer, batch, batch["x"].shape[0])
    optimizer.step()
    return total


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _reducer(model, mesh):
    def reduce():
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))

    return reduce


def step_bad(model, optimizer, batch, mesh):
    samples = batch["x"].shape[0] * mesh.size()
    total = _accumulate(model, optimizer, batch, samples, _reducer(model, mesh))
    optimizer.step()
    return total


def step_good(model, optimizer, batch, mesh):
    total = _accumulate(model, optimizer, batch, batch["x"].shape[0] * mesh.size())
    _reducer(model, mesh)()
    optimizer.step()
    return total


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction", "factor"],
        "stage": "gradients",
        "tensors": ["lower.weight", "upper.weight"],
        "mentions": ["lower.weight", "3"],
    },
    "good": {"verdict": "pass"},
}
