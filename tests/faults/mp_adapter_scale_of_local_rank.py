"""Low-rank adapter whose inner dim is cut over tp. The scale alpha / rank is computed from the
local rank, so the branch counts once per rank of tp.
Class: scales derived from a local size.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Lora(nn.Module):
    def __init__(self, i, o, r=4, alpha=8, zero=False):
        super().__init__()
        self.base = nn.Linear(i, o)
        self.base.requires_grad_(False)
        self.a = nn.Linear(i, r, bias=False)
        self.b = nn.Linear(r, o, bias=False)
        self.scale = alpha / r
        self.group = None

    def forward(self, x):
        h = x if self.group is None else _Copy.apply(x, self.group)
        branch = self.b(self.a(h))
        if self.group is not None:
            branch = _Sum.apply(branch, self.group)
        return self.base(x) + self.scale * branch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(5, 6)
        self.mid = Lora(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(torch.tanh(self.pre(x)))))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        t = p.clone()
        dist.all_reduce(t, group=g)
        return t

    @staticmethod
    def backward(ctx, grad):
        return (grad, None)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        ctx.g = g
        return p.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.g)
        return (grad, None)


def get_inputs(step=0):
    return _noise(4500 + step, 8, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(4530 + step))


def loss(o, t):
    return F.cross_entropy(o, t)


def get_optimizer(p):
    return torch.optim.SGD([q for q in p if q.requires_grad], lr=0.3)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def mesh_bad_four():
    return {"tp": 4}


def layout_bad():
    return {"mid.a.weight": {"tp": Shard(0)}, "mid.b.weight": {"tp": Shard(1)}}


layout_bad_four = layout_bad
layout_good = layout_bad


def _par(m, mesh, k):
    r, n = (mesh.get_local_rank("tp"), mesh.size())
    m.mid.a.weight = nn.Parameter(m.mid.a.weight.detach().chunk(n, 0)[r].clone())
    m.mid.b.weight = nn.Parameter(m.mid.b.weight.detach().chunk(n, 1)[r].clone())
    m.mid.group = mesh.get_group("tp")
    m.mid.scale *= k
    return m


def parallelize_bad(m, mesh):
    return _par(m, mesh, mesh.size())


parallelize_bad_four = parallelize_bad


def parallelize_good(m, mesh):
    return _par(m, mesh, 1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "module_outputs",
        "tensors": ["mid"],
        "mentions": ["mid", "2.0000", "tp"],
    },
    "bad_four": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "module_outputs",
        "tensors": ["mid"],
        "mentions": ["4.0000"],
    },
    "good": {"verdict": "pass"},
}
