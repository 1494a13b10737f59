"""False-alarm trap: a frozen layer in a fully_shard group of its own, and a branch that gets no
gradient. Neither moves, on one device or on three.
Compare https://github.com/facebookresearch/fairscale/issues/605 (frozen by grad = None)
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
        self.frozen = nn.Linear(4, 7).requires_grad_(False)
        self.tuned = nn.Linear(7, 5)
        self.idle = nn.Linear(7, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.tuned(torch.tanh(self.frozen(x)))))


def get_inputs(step=0):
    return _normal(371 + step, 9, 4)


def get_targets(step=0):
    return _normal(381 + step, 9, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.5)


def mesh_apart():
    return {"dp": 3}


mesh_together = mesh_apart


def parallelize_apart(model, mesh):
    fully_shard(model.frozen, mesh=mesh)
    fully_shard(model.tuned, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallelize_together(model, mesh):
    return fully_shard(model, mesh=mesh)


EXPECT = {"apart": {"verdict": "pass"}, "together": {"verdict": "pass"}}
