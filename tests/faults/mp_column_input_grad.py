"""Column-parallel layers read a replicated activation; in backward each rank holds a part of that
activation's gradient, which `bad` hands on unsummed, so everything in front of the layer learns
from its own columns only.
Class: https://github.com/NVIDIA/TransformerEngine/issues/435 (the reduction is the caller's duty)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner)
        self.value = nn.Linear(width, inner)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.out(F.silu(self.gate(x)) * self.value(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.block = Block(6, 12)
        self.head = nn.Linear(6, 2)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.head(self.block(self.norm(self.stem(x))))


def get_inputs(step=0):
    return _noise(600 + step, 5, 4)


def get_targets(step=0):
    return _noise(630 + step, 5, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.1, eps=1e-3)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad():
    return {"tp": 3}


def layout_bad():
    return {"block.gate.*": [Shard(0)], "block.value.*": [Shard(0)], "block.out.weight": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, enter):
    group, block = mesh.get_group("tp"), model.block
    for layer in (block.gate, block.value):
        for name in ("weight", "bias"):
            whole = getattr(layer, name).detach()
            setattr(layer, name, nn.Parameter(whole.chunk(group.size(), 0)[group.rank()].clone()))
    columns = block.out.weight.detach().chunk(group.size(), 1)[group.rank()]
    block.out.weight = nn.Parameter(columns.clone())
    local = block.forward
    block.forward = lambda x: _Leave.apply(local(enter(x, group)), group)
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, lambda x, group: x)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, _Enter.apply)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["norm.weight", "norm.bias", "stem.weight", "stem.bias"],
        "mentions": ["norm.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
