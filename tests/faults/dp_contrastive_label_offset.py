"""Contrastive loss against the features of all ranks, gathered with gradients. The labels count
from 0 on every rank; the twin starts at rank x batch.
Class: label offsets of a gathered contrastive loss.
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
        self.image = nn.Linear(5, 6)
        self.text = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x, y):
        return (F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1))


def get_inputs(step=0):
    return {"x": _noise(4500 + step, 8, 5), "y": _noise(4600 + step, 8, 4)}


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.3)


def _cost(model, a, b, whole_a, whole_b, start):
    labels = torch.arange(len(a)) + start
    return (
        F.cross_entropy(model.scale * a @ whole_b.t(), labels)
        + F.cross_entropy(model.scale * b @ whole_a.t(), labels)
    ) / 2


def step(model, optimizer, batch):
    optimizer.zero_grad()
    a, b = model(**batch)
    v = _cost(model, a, b, a, b, 0)
    v.backward()
    optimizer.step()
    return v.detach()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def _train(model, optimizer, batch, mesh, start, whole):
    optimizer.zero_grad()
    a, b = model(**batch)
    v = _cost(model, a, b, whole(a), whole(b), start)
    v.backward()
    v = v.detach().clone()
    for t in [v, *(p.grad for p in model.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    optimizer.step()
    return v


def mesh_bad():
    return {"dp": 2}


def mesh_bad_four():
    return {"dp": 4}


def mesh_good():
    return {"dp": 4}


def parallelize_good(m, mesh):
    return m


parallelize_bad_four = parallelize_good
parallelize_bad = parallelize_good


def step_good(m, o, b, mesh):
    return _train(m, o, b, mesh, mesh.get_rank() * len(b["x"]), _Whole.apply)


def step_bad(m, o, b, mesh):
    return _train(m, o, b, mesh, 0, _Whole.apply)


step_bad_four = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "loss",
        "tensors": ["loss"],
        "mentions": ["dp", "offset"],
    },
    "bad_four": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "loss",
        "tensors": ["loss"],
        "mentions": ["dp", "offset"],
    },
    "good": {"verdict": "pass"},
}
