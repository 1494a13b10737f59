"""Features cut by columns are collected with `torch.distributed.nn.functional.all_gather`, then
every rank computes the same loss. The gather's backward sums the ranks' equal gradients: layers in
front of it learn tp times too fast.
Class: https://github.com/deepspeedai/DeepSpeed/issues/5248 (a backward that sums what every rank
already holds whole)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.score = nn.Linear(8, 3)

    def join(self, features):
        return features

    def forward(self, x):
        return self.score(self.norm(F.silu(self.join(self.tower(x)))))


def get_inputs(step=0):
    return _noise(1400 + step, 6, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(1430 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets, label_smoothing=0.05)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, weight_decay=0.01)


class _Join(torch.autograd.Function):
    """Collect columns; backward keeps own columns, for each rank holds the whole gradient."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def mesh_bad():
    return {"tp": 2}


def layout_bad():
    return {"tower.*": [Shard(0)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, join):
    ranks, rank = mesh.size(), mesh.get_local_rank("tp")
    tower = model.tower
    tower.weight = nn.Parameter(tower.weight.detach().chunk(ranks, 0)[rank].clone())
    tower.bias = nn.Parameter(tower.bias.detach().chunk(ranks, 0)[rank].clone())
    model.join = join
    return model


def parallelize_bad(model, mesh):
    group = mesh.get_group("tp")
    return _parallelize(model, mesh, lambda part: torch.cat(all_gather(part, group=group), -1))


def parallelize_good(model, mesh):
    group = mesh.get_group("tp")
    return _parallelize(model, mesh, lambda part: _Join.apply(part, group))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor", "double_reduction"],
        "stage": "gradients",
        "tensors": ["tower.weight", "tower.bias"],
        "mentions": ["tower.weight", "2", "tp"],
    },
    "good": {"verdict": "pass"},
}
