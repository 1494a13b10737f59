"""Tensor parallel weights on a dp x tp mesh are cut with the data-parallel index: both tp ranks of
one replica hold the same half, the other replica has the rest. The twin cuts with the tp index.
Class: https://github.com/Modalities/modalities/pull/426 (parts that repeat)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(5, 8)
        self.fall = nn.Linear(8, 3, bias=False)
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, 3))

    def collect(self, partial):
        return partial

    def forward(self, x, y):
        partial = self.fall(torch.tanh(self.rise(x)))
        return F.l1_loss(self.collect(partial) + self.shift, y)


def get_inputs(step=0):
    return {"x": _normal(222 + step, 8, 5), "y": 2 * _normal(272 + step, 8, 3)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mesh_bad():
    return {"dp": 2, "tp": 2}


mesh_good = mesh_bad


def layout_bad():
    return {
        "rise.weight": [Replicate(), Shard(0)],
        "rise.bias": [Replicate(), Shard(0)],
        "fall.weight": [Replicate(), Shard(1)],
        "shift": [Replicate(), Replicate()],
    }


layout_good = layout_bad


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _cut(model, mesh, index):
    group = mesh.get_group("tp")
    for module, key, dim in (
        (model.rise, "weight", 0),
        (model.rise, "bias", 0),
        (model.fall, "weight", 1),
    ):
        part = getattr(module, key).detach().chunk(mesh["tp"].size(), dim)[index]
        setattr(module, key, nn.Parameter(part.clone()))
    model.collect = lambda partial: _Collect.apply(partial, group)
    return model


def parallelize_bad(model, mesh):
    return _cut(model, mesh, mesh.get_local_rank(0))


def parallelize_good(model, mesh):
    return _cut(model, mesh, mesh.get_local_rank("tp"))


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.div_(mesh["dp"].size()), group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial", "layout"],
        "stage": "initial_state",
        "tensors": ["rise.weight", "rise.bias", "fall.weight"],
        "mentions": ["rise.weight", "initial_state"],
    },
    "good": {"verdict": "pass"},
}
