"""The optimizer is built, then parallelize_module replaces the projections' weights by new DTensor
parameters. The optimizer goes on stepping the old tensors: cut layers never move, plain ones do.
Class: https://github.com/OpenRLHF/OpenRLHF/pull/1357 (a stale reference: writes go to another copy)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        h = F.relu(self.stem(x))
        return self.head(h + self.back(F.relu(self.wide(h))))


def get_inputs(step=0):
    return _noise(6300 + step, 8, 4)


def get_targets(step=0):
    return _noise(6330 + step, 8, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def _cut(model, mesh):
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def setup_bad(model, mesh):
    optimizer = get_optimizer(list(model.parameters()))
    return _cut(model, mesh), optimizer


def setup_good(model, mesh):
    model = _cut(model, mesh)
    return model, get_optimizer(list(model.parameters()))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": ["optimizer_state", "parameters"],
        "tensors": ["wide.weight", "wide.bias", "back.weight", "back.bias"],
        "mentions": ["wide.weight", "optimizer"],
    },
    "good": {"verdict": "pass"},
}
