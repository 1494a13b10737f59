"""The optimizer is built, then the parameters are replaced by sharded ones: `bad_fsdp` by
fully_shard, `bad_tp` by parallelize_module. step() finds no gradient and nothing moves.
Class: https://github.com/pytorch/pytorch/issues/117742 (who holds which parameter object)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(F.mish(self.up(x)))


def get_inputs(step=0):
    return _normal(130 + step, 4, 6)


def get_targets(step=0):
    return _normal(180 + step, 4, 6)


def loss(output, targets):
    return F.huber_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.05)


def mesh_bad_tp():
    return {"tp": 2}


mesh_good_tp = mesh_bad_tp


def _cut(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def setup_bad_fsdp(model, mesh):
    optimizer = get_optimizer(list(model.parameters()))
    return fully_shard(model, mesh=mesh), optimizer


def setup_good_fsdp(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, get_optimizer(list(model.parameters()))


def setup_bad_tp(model, mesh):
    optimizer = get_optimizer(list(model.parameters()))
    return _cut(model, mesh), optimizer


def setup_good_tp(model, mesh):
    model = _cut(model, mesh)
    return model, get_optimizer(list(model.parameters()))


_NEVER_MOVES = {
    "verdict": "mismatch",
    "kind": ["stale"],
    "stage": ["optimizer_state", "parameters"],
    "tensors": ["up.weight", "up.bias", "down.weight", "down.bias"],
    "mentions": ["up.weight", "optimizer"],
}

EXPECT = {
    "bad_fsdp": _NEVER_MOVES,
    "good_fsdp": {"verdict": "pass"},
    "bad_tp": _NEVER_MOVES,
    "good_tp": {"verdict": "pass"},
}
