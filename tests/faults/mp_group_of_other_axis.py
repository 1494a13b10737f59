"""Row-parallel layer on a dp x tp mesh whose partial sums are reduced over the dp group: other
samples' partial sums are added instead of the other half of the columns. Shapes agree, nothing
raises.
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
        self.wide = nn.Linear(5, 8)
        self.back = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.back(F.silu(self.wide(x)))))


def get_inputs(step=0):
    return _noise(4500 + step, 8, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(4530 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad():
    return {"dp": 2, "tp": 2}


def layout_bad():
    return {"wide.*": {"tp": Shard(0)}, "back.weight": {"tp": Shard(1)}}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, axis):
    rank, wide, back = mesh.get_local_rank("tp"), model.wide, model.back
    for owner, name, dim in ((wide, "weight", 0), (wide, "bias", 0), (back, "weight", 1)):
        own = getattr(owner, name).detach().chunk(2, dim)[rank]
        setattr(owner, name, nn.Parameter(own.clone()))
    group = mesh.get_group(axis)
    back.forward = lambda h: _Leave.apply(F.linear(h, back.weight), group) + back.bias
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, "dp")


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, "tp")


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad.div_(2)
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "module_outputs",
        "tensors": ["back"],
        "mentions": ["back", "tp"],
    },
    "good": {"verdict": "pass"},
}
