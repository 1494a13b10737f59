"""False-alarm trap: a row-parallel layer whose ranks all add the bias before the reduction, each a
third of it (`shared`), or the last rank alone adds it (`last`). Both look like a bias counted tp
times and are right.
Compare https://github.com/GeeeekExplorer/nano-vllm/issues/99
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
        self.wide = nn.Linear(5, 9)
        self.back = nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.back.bias, 1.0)

    def forward(self, x):
        return self.norm(self.back(F.selu(self.wide(x))))


def get_inputs(step=0):
    return _noise(5000 + step, 6, 5)


def get_targets(step=0):
    return _noise(5030 + step, 6, 6)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_shared():
    return {"tp": 3}


def layout_shared():
    return {"wide.*": [Shard(0)], "back.weight": [Shard(1)]}


mesh_last, layout_last = mesh_shared, layout_shared


def _parallelize(model, mesh, shares):
    group, wide, back = mesh.get_group("tp"), model.wide, model.back
    for owner, name, dim in ((wide, "weight", 0), (wide, "bias", 0), (back, "weight", 1)):
        own = getattr(owner, name).detach().chunk(group.size(), dim)[group.rank()]
        setattr(owner, name, nn.Parameter(own.clone()))
    share = shares[group.rank()]
    back.forward = lambda h: _Leave.apply(F.linear(h, back.weight) + share * back.bias, group)
    return model


def parallelize_shared(model, mesh):
    return _parallelize(model, mesh, [1 / 3] * 3)


def parallelize_last(model, mesh):
    return _parallelize(model, mesh, [0.0, 0.0, 1.0])


def step_shared(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    dist.all_reduce(model.back.bias.grad, group=mesh.get_group("tp"))
    optimizer.step()
    return value.detach()


step_last = step_shared

EXPECT = {name: {"verdict": "pass"} for name in ("shared", "last")}
