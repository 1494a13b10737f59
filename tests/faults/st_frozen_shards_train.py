"""Cutting a frozen layer into tensor parallel shards wraps them in nn.Parameter, which by default
requires a gradient: the frozen weights train. The twin passes the flag on.
Class: https://github.com/facebookresearch/fairscale/pull/721 (frozen weights that were trained)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapt = nn.Linear(5, 6)
        self.wide = nn.Linear(6, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 3, bias=False)

    def enter(self, h):
        return h

    def leave(self, partial):
        return partial

    def forward(self, x):
        h = self.enter(torch.tanh(self.adapt(x)))
        return self.leave(self.narrow(F.softplus(self.wide(h))))


def get_inputs(step=0):
    return _normal(909 + step, 6, 5)


def get_targets(step=0):
    return _normal(959 + step, 6, 3)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def layout_bad():
    return {"wide.weight": [Shard(0)], "wide.bias": [Shard(0)], "narrow.weight": [Shard(1)]}


layout_good = layout_bad


class _SumOnce(torch.autograd.Function):
    """Sums over the group in forward or in backward, and passes through in the other."""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward = group, in_forward
        x = x.clone()
        if in_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if not ctx.in_forward:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def _cut(model, mesh, wrap):
    size, rank, group = mesh.size(), mesh.get_local_rank("tp"), mesh.get_group("tp")
    for layer, dim in ((model.wide, 0), (model.narrow, 1)):
        for key, whole in list(layer.named_parameters()):
            setattr(layer, key, wrap(whole.detach().chunk(size, dim)[rank].clone(), whole))
    model.enter = lambda h: _SumOnce.apply(h, group, False)
    model.leave = lambda partial: _SumOnce.apply(partial, group, True)
    return model


def parallelize_bad(model, mesh):
    return _cut(model, mesh, lambda part, whole: nn.Parameter(part))


def parallelize_good(model, mesh):
    return _cut(model, mesh, lambda part, whole: nn.Parameter(part, whole.requires_grad))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused"],
        "stage": ["initial_state", "gradients", "optimizer_state", "parameters"],
        "tensors": ["wide.weight", "wide.bias"],
        "mentions": ["wide.weight"],
    },
    "good": {"verdict": "pass"},
}
