"""Column-parallel layer beside a residual: its input goes in without the copy whose backward is an
all-reduce over tp. The residual's gradient is whole, the branch's is one rank's share.
Class: Megatron's f function left out.
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
        self.inp = nn.Linear(5, 6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 3)
        self.enter = lambda x: x
        self.leave = lambda x: x

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(self.norm(x + self.leave(self.back(F.silu(self.wide(self.enter(x)))))))


def get_inputs(step=0):
    return _noise(4500 + step, 8, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(4530 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


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


def mesh_good():
    return {"dp": 2, "tp": 2}


def layout_good():
    return {"wide.*": {"tp": Shard(0)}, "back.weight": {"tp": Shard(1)}}


layout_bad = layout_good
layout_bad_two_axes = layout_good


def _cut(m, mesh, fwd, bwd):
    rank = mesh.get_local_rank("tp")
    for owner, name, dim in ((m.wide, "weight", 0), (m.wide, "bias", 0), (m.back, "weight", 1)):
        setattr(
            owner, name, nn.Parameter(getattr(owner, name).detach().chunk(2, dim)[rank].clone())
        )
    f, b = (mesh.get_group(fwd), bwd and mesh.get_group(bwd))
    m.leave = lambda x: _Sum.apply(x, f)
    if b:
        m.enter = lambda x: _Copy.apply(x, b)
    return m


def parallelize_good(m, mesh):
    return _cut(m, mesh, "tp", "tp")


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad.div_(2)
    optimizer.step()
    return v.detach()


step_bad_two_axes = step_good


def mesh_bad():
    return {"tp": 2}


def mesh_bad_two_axes():
    return {"dp": 2, "tp": 2}


def parallelize_bad(m, mesh):
    return _cut(m, mesh, "tp", None)


parallelize_bad_two_axes = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    optimizer.step()
    return v.detach()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["inp.weight", "inp.bias"],
        "mentions": ["wide", "tp"],
    },
    "bad_two_axes": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["inp.weight"],
        "mentions": ["wide", "tp"],
    },
    "good": {"verdict": "pass"},
}
