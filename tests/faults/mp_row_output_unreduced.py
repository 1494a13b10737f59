"""Row-parallel projection whose partial sums go on without an all-reduce: by hand on plain tensors
(`bad_plain`) and by reading the local part of a Partial DTensor (`bad_dtensor`:
output_layouts=Partial). The twins reduce.
Class: https://github.com/pytorch/torchtitan/pull/3412 (a partial activation used as if complete)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 8)
        self.fc2 = nn.Linear(8, 6, bias=False)
        self.act = nn.ELU()
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.act(self.fc2(torch.tanh(self.fc1(x)))))


def get_inputs(step=0):
    return _noise(500 + step, 7, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (7,), generator=torch.Generator().manual_seed(530 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_bad_plain():
    return {"tp": 2}


mesh_good_plain = mesh_bad_dtensor = mesh_good_dtensor = mesh_bad_plain


def layout_bad_plain():
    return {"fc1.*": [Shard(0)], "fc2.weight": [Shard(1)]}


layout_good_plain = layout_bad_plain


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _cut(model, mesh):
    ranks, rank = mesh.size(), mesh.get_local_rank("tp")
    model.fc1.weight = nn.Parameter(model.fc1.weight.detach().chunk(ranks, 0)[rank].clone())
    model.fc1.bias = nn.Parameter(model.fc1.bias.detach().chunk(ranks, 0)[rank].clone())
    model.fc2.weight = nn.Parameter(model.fc2.weight.detach().chunk(ranks, 1)[rank].clone())


def parallelize_bad_plain(model, mesh):
    _cut(model, mesh)
    return model


def parallelize_good_plain(model, mesh):
    _cut(model, mesh)
    fc2, group = model.fc2, mesh.get_group("tp")
    fc2.forward = lambda h: _Reduce.apply(F.linear(h, fc2.weight), group)
    return model


def parallelize_bad_dtensor(model, mesh):
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel(output_layouts=Partial())}
    return parallelize_module(model, mesh, plan)


def parallelize_good_dtensor(model, mesh):
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


_FAULT = {
    "verdict": "mismatch",
    "kind": ["missing_reduction"],
    "stage": "module_outputs",
    "tensors": ["act"],
    "mentions": ["fc2", "tp"],
}
EXPECT = {
    "bad_plain": _FAULT,
    "good_plain": {"verdict": "pass"},
    "bad_dtensor": _FAULT,
    "good_dtensor": {"verdict": "pass"},
}
