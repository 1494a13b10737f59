"""Sequence parallel: tokens are gathered in front of column-parallel layers. Backward slices the
gradient instead of reducing and scattering it, so the columns of other ranks are lost.
Class: an all-gather whose backward is a split.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.gatep = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 9)
        self.enter = lambda x: x
        self.leave = lambda x: x

    def forward(self, ids):
        x = self.embed(ids)
        h = self.enter(self.norm(x))
        return self.head(x + self.leave(self.down(F.silu(self.gatep(h)) * self.up(h))))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.5)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, slices):
        ctx.g, ctx.s = (group, slices)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if not ctx.s:
            dist.all_reduce(grad, group=ctx.g)
        return (grad.chunk(ctx.g.size(), 1)[ctx.g.rank()].contiguous(), None, None)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.g = group
        t = part.clone()
        dist.all_reduce(t, group=group)
        return t.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.g.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.g)
        return (torch.cat(parts, 1), None)


def mesh_bad():
    return {"tp": 2}


def mesh_good():
    return {"tp": 2}


def mesh_bad_two_axes():
    return {"dp": 2, "tp": 2}


def layout_bad():
    return {"up.*": {"tp": Shard(0)}, "gatep.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


layout_bad_two_axes = layout_bad
layout_good = layout_bad


def _cut(m, mesh):
    g = mesh.get_group("tp")
    r, n = (g.rank(), g.size())
    for o, name, dim in (
        (m.up, "weight", 0),
        (m.up, "bias", 0),
        (m.gatep, "weight", 0),
        (m.gatep, "bias", 0),
        (m.down, "weight", 1),
    ):
        setattr(o, name, nn.Parameter(getattr(o, name).detach().chunk(n, dim)[r].clone()))
    return (m, g)


def _seq(m, mesh, slices):
    m, g = _cut(m, mesh)
    m.enter = lambda x: _Gather.apply(x, g, slices)
    m.leave = lambda x: _Scatter.apply(x, g)
    return m


def parallelize_bad(m, mesh):
    return _seq(m, mesh, True)


parallelize_bad_two_axes = parallelize_bad


def parallelize_good(m, mesh):
    return _seq(m, mesh, False)


def step_bad(model, optimizer, batch, mesh):
    g = mesh.get_group("tp")
    ids, t = (x.chunk(g.size(), 1)[g.rank()] for x in batch)
    optimizer.zero_grad()
    v = loss(model(ids), t) / g.size()
    v.backward()
    v = v.detach().clone()
    dist.all_reduce(v, group=g)
    for n, p in model.named_parameters():
        if not n.startswith(("up", "gatep", "down")):
            dist.all_reduce(p.grad, group=g)
        if mesh.ndim > 1:
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad.div_(2)
    if mesh.ndim > 1:
        dist.all_reduce(v, group=mesh.get_group("dp"))
        v.div_(2)
    optimizer.step()
    return v


step_bad_two_axes = step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["norm.weight", "norm.bias", "embed.weight"],
        "mentions": ["tp", "slice"],
    },
    "bad_two_axes": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["norm.weight"],
        "mentions": ["tp", "slice"],
    },
    "good": {"verdict": "pass"},
}
