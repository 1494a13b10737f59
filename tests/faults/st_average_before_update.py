"""An average of the student's weights is taken before the optimizer has stepped, or on a copy.
Class: exponential averages of weights that follow stale values.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(5, 3)
        self.teacher = nn.Linear(5, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x, y):
        return F.mse_loss(self.student(x), y) + F.mse_loss(self.student(x), self.teacher(x))


def get_inputs(step=0):
    return {"x": _noise(1 + step, 8, 5), "y": _noise(9 + step, 8, 3)}


def get_optimizer(p):
    return torch.optim.SGD([q for q in p if q.requires_grad], lr=0.3)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    v = model(**batch)
    v.backward()
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.lerp_(s, 0.1)
    return v.detach()


def mesh_bad_early():
    return {"dp": 2}


mesh_good = mesh_bad_early
mesh_bad_copy = mesh_bad_early


def parallelize_bad_early(m, mesh):
    return m


parallelize_bad_copy = parallelize_bad_early
parallelize_good = parallelize_bad_early


def _train(model, optimizer, batch, mesh, how):
    optimizer.zero_grad()
    v = model(**batch)
    v.backward()
    v = v.detach().clone()
    for t in [v, *(p.grad for p in model.student.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    old = [p.detach().clone() for p in model.student.parameters()]
    optimizer.step()
    with torch.no_grad():
        for t, s, o in zip(
            model.teacher.parameters(), model.student.parameters(), old, strict=True
        ):
            (t.clone() if how == "copy" else t).lerp_(o if how == "early" else s, 0.1)
    return v


def step_bad_early(*a):
    return _train(*a, "early")


def step_bad_copy(*a):
    return _train(*a, "copy")


def step_good(*a):
    return _train(*a, "")


EXPECT = {
    "bad_early": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "parameters",
        "tensors": ["teacher.weight", "teacher.bias"],
        "mentions": ["student.weight", "average"],
    },
    "bad_copy": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "parameters",
        "tensors": ["teacher.weight"],
        "mentions": ["student.weight", "average"],
    },
    "good": {"verdict": "pass"},
}
