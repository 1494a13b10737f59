"""A sharded teacher follows the student by a moving average written into `full_tensor()`, which is
a copy: the teacher never moves. The twin averages shard with shard.
Class: https://github.com/OpenRLHF/OpenRLHF/pull/1357 (EMA lost when the shards come back)
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x, noisy, y):
        guess = self.student(noisy)
        return F.mse_loss(guess, y) + 0.5 * F.mse_loss(guess, self.teacher(x))


def get_inputs(step=0):
    x = _normal(31 + step, 8, 5)
    return {"x": x, "noisy": x + 0.3 * _normal(61 + step, 8, 5), "y": _normal(91 + step, 8, 4)}


def get_optimizer(params):
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.3, momentum=0.4)


def _pairs(model):
    return zip(model.teacher.parameters(), model.student.parameters(), strict=True)


def _backward(model, optimizer, batch):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    value = _backward(model, optimizer, batch)
    with torch.no_grad():
        for teacher, student in _pairs(model):
            teacher.lerp_(student, 0.2)
    return value


def parallelize_bad(model, mesh):
    for part in (model.student, model.teacher, model):
        fully_shard(part, mesh=mesh)
    return model


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    with torch.no_grad():
        for teacher, student in _pairs(model):
            teacher.full_tensor().lerp_(student.full_tensor(), 0.2)
    return value


def step_good(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    with torch.no_grad():
        for teacher, student in _pairs(model):
            teacher.to_local().lerp_(student.to_local(), 0.2)
    return value


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "parameters",
        "tensors": ["teacher.0.weight", "teacher.2.weight"],
        "mentions": ["teacher.0.weight"],
    },
    "good": {"verdict": "pass"},
}
