"""Channels are cut over tp, and GroupNorm keeps its number of groups: the groups of a rank have
fewer channels than on one device. The twin divides the groups by the ranks.
Class: normalisation over the channels a rank has.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(2, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.c2 = nn.Conv2d(16, 4, 3, padding=1)
        self.out = nn.Linear(4, 3)
        self.leave = lambda x: x

    def forward(self, x):
        h = self.leave(self.c2(F.relu(self.norm(self.c1(x)))))
        return self.out(torch.tanh(h).mean((2, 3)))


def get_inputs(step=0):
    return _noise(4500 + step, 4, 2, 5, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(4530 + step))


def loss(o, t):
    return F.cross_entropy(o, t)


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.3)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        t = p.clone()
        dist.all_reduce(t, group=g)
        return t

    @staticmethod
    def backward(ctx, grad):
        return (grad, None)


def mesh_bad():
    return {"tp": 2}


def mesh_bad_four():
    return {"tp": 4}


def mesh_good():
    return {"tp": 4}


def layout_bad():
    return {"c1.*": {"tp": Shard(0)}, "norm.*": {"tp": Shard(0)}, "c2.weight": {"tp": Shard(1)}}


layout_bad_four = layout_bad
layout_good = layout_bad


def _cut(m, mesh, groups):
    g = mesh.get_group("tp")
    r, n = (g.rank(), g.size())
    for o, name, dim in (
        (m.c1, "weight", 0),
        (m.c1, "bias", 0),
        (m.norm, "weight", 0),
        (m.norm, "bias", 0),
        (m.c2, "weight", 1),
    ):
        setattr(o, name, nn.Parameter(getattr(o, name).detach().chunk(n, dim)[r].clone()))
    m.norm.num_channels //= n
    m.norm.num_groups = groups
    c2 = m.c2
    c2.forward = lambda h: F.conv2d(h, c2.weight, None, padding=1)
    m.leave = lambda x: _Sum.apply(x, g) + c2.bias[:, None, None]
    return m


def parallelize_bad(m, mesh):
    return _cut(m, mesh, 4)


parallelize_bad_four = parallelize_bad


def parallelize_good(m, mesh):
    return _cut(m, mesh, 4 // mesh.size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["batch_statistics"],
        "stage": "module_outputs",
        "tensors": ["norm"],
        "mentions": ["norm", "GroupNorm", "tp"],
    },
    "bad_four": {
        "verdict": "mismatch",
        "kind": ["batch_statistics"],
        "stage": "module_outputs",
        "tensors": ["norm"],
        "mentions": ["tp"],
    },
    "good": {"verdict": "pass"},
}
