"""On a dp x tp mesh an all-reduce uses the group of dp where that of tp is due: of summands in
forward, of the gradient that enters a column-parallel layer.
Class: https://github.com/deepspeedai/DeepSpeed/pull/5259 (the wrong group of a mesh)
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


def mesh_bad_forward():
    return {"dp": 2, "tp": 2}


mesh_good = mesh_bad_forward
mesh_bad_backward = mesh_bad_forward


def layout_bad_forward():
    return {"wide.*": {"tp": Shard(0)}, "back.weight": {"tp": Shard(1)}}


layout_bad_backward = layout_bad_forward
layout_good = layout_bad_forward


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


def parallelize_bad_forward(m, mesh):
    return _cut(m, mesh, "dp", "tp")


def parallelize_bad_backward(m, mesh):
    return _cut(m, mesh, "tp", "dp")


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad.div_(2)
    optimizer.step()
    return v.detach()


step_bad_backward = step_good
step_bad_forward = step_good

EXPECT = {
    "bad_forward": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "module_outputs",
        "tensors": ["back"],
        "mentions": ["dp", "tp", "instead of"],
    },
    "bad_backward": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["inp.weight", "inp.bias"],
        "mentions": ["dp", "tp", "instead of"],
    },
    "good": {"verdict": "pass"},
}
