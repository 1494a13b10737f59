"""Dropout under tensor parallelism. `bad_shards`: every rank draws the mask of its own columns from
the same seed, so the masks of all shards are equal. `bad_replicas`: the mask of a replicated
activation is drawn from a seed that depends on the rank. The twins draw the whole mask and take
their columns.
Class: https://github.com/NVIDIA/TransformerEngine/pull/1272,
https://github.com/pytorch/pytorch/issues/168058
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Dropper(nn.Module):
    def draw(self, x):
        return torch.rand(x.shape)

    def forward(self, x):
        return x * (self.draw(x) > 0.4) / 0.6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 8)
        self.inner = Dropper()
        self.fc2 = nn.Linear(8, 5)
        self.outer = Dropper()

    def forward(self, x, y):
        hidden = self.inner(torch.tanh(self.fc1(x)))
        return F.mse_loss(self.outer(self.fc2(hidden)), y)


def get_inputs(step=0):
    return {"x": _noise(3300 + step, 6, 5), "y": _noise(3330 + step, 6, 5)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad_shards():
    return {"tp": 2}


def layout_bad_shards():
    return {"fc1.*": [Shard(0)], "fc2.weight": [Shard(1)]}


mesh_bad_replicas = mesh_good_shards = mesh_good_replicas = mesh_bad_shards
layout_bad_replicas = layout_good_shards = layout_good_replicas = layout_bad_shards


def parallelize_bad_shards(model, mesh):
    group, fc1, fc2 = mesh.get_group("tp"), model.fc1, model.fc2
    for owner, name, dim in ((fc1, "weight", 0), (fc1, "bias", 0), (fc2, "weight", 1)):
        own = getattr(owner, name).detach().chunk(2, dim)[group.rank()]
        setattr(owner, name, nn.Parameter(own.clone()))
    fc2.forward = lambda h: _Leave.apply(F.linear(h, fc2.weight), group) + fc2.bias
    return model


def parallelize_good_shards(model, mesh):
    model = parallelize_bad_shards(model, mesh)
    rank = mesh.get_local_rank("tp")

    def columns(x):
        return torch.rand(x.shape[0], 2 * x.shape[1]).chunk(2, 1)[rank]

    model.inner.draw = columns
    return model


def parallelize_bad_replicas(model, mesh):
    model = parallelize_good_shards(model, mesh)
    source = torch.Generator().manual_seed(7 + mesh.get_local_rank("tp"))
    model.outer.draw = lambda x: torch.rand(x.shape, generator=source)
    return model


parallelize_good_replicas = parallelize_good_shards


def _fault(tensor):
    return {
        "verdict": "mismatch",
        "kind": ["random_stream"],
        "stage": "module_outputs",
        "tensors": [tensor],
        "mentions": [tensor, "tp"],
    }


EXPECT = {
    "bad_shards": _fault("inner"),
    "good_shards": {"verdict": "pass"},
    "bad_replicas": _fault("outer"),
    "good_replicas": {"verdict": "pass"},
}
