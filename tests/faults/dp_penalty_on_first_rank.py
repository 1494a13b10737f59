"""A penalty on the weights is added to rank 0's loss only, so that it is not counted once per rank;
but DDP averages, and a third of it is left. The twin adds it everywhere.
Class: https://github.com/OpenNMT/OpenNMT-py/issues/2209
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

STRENGTH = 0.3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def get_inputs(step=0):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(14100 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(14200 + step))


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def _train(model, optimizer, batch, weight, strength):
    optimizer.zero_grad()
    value = F.cross_entropy(model(batch[0]), batch[1]) + strength * weight.abs().mean()
    value.backward()
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, model.first.weight, STRENGTH)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    strength = STRENGTH if mesh.get_local_rank("dp") == 0 else 0.0
    return _train(model, optimizer, batch, model.module.first.weight, strength)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, model.module.first.weight, STRENGTH)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive"],
        "stage": "loss",
        "tensors": ["first.weight"],
        "mentions": ["first.weight"],
    },
    "good": {"verdict": "pass"},
}
