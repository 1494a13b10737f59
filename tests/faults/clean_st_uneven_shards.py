"""False-alarm trap: fully_shard over four ranks with sizes that do not divide and shards that are
empty, wrapped whole, by layer, or without resharding after forward. All are right.
Compare https://github.com/pytorch/torchtitan/pull/4535 (sizes that do not divide)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.second = nn.Linear(7, 5)
        self.third = nn.Linear(5, 2)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def get_inputs(step=0):
    return _normal(301 + step, 8, 3)


def get_targets(step=0):
    return _normal(302 + step, 8, 2)


def loss(output, targets):
    return F.smooth_l1_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True)


def mesh_whole():
    return {"dp": 4}


mesh_layers = mesh_resident = mesh_whole


def parallelize_whole(model, mesh):
    return fully_shard(model, mesh=mesh)


def parallelize_layers(model, mesh):
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallelize_resident(model, mesh):
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


EXPECT = {name: {"verdict": "pass"} for name in ("whole", "layers", "resident")}
