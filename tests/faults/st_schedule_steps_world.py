"""The learning-rate schedule is stepped once for every rank, four times a training step, as by
wrappers that assume a schedule for W times as many steps. The twin steps it once.
Class: https://github.com/huggingface/accelerate/issues/2142 (scheduler advances N per step)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 6)
        self.two = nn.Linear(6, 5)

    def forward(self, x):
        return x + self.two(F.softsign(self.one(x)))


def get_inputs(step=0):
    return _normal(74 + step, 8, 5)


def get_targets(step=0):
    return _normal(76 + step, 8, 5)


def loss(output, targets):
    return F.l1_loss(output, targets)


def get_optimizer(params):
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return optimizer


def _train(model, optimizer, batch, turns):
    x, y = batch
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    optimizer.step()
    for _ in range(turns):
        optimizer.schedule.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, 1)


def mesh_bad():
    return {"dp": 4}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh.size())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "inputs",
        "tensors": ["one.weight", "two.weight"],
        "mentions": ["lr"],
    },
    "good": {"verdict": "pass"},
}
