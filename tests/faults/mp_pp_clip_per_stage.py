"""Two pipeline stages, each clips by the norm of its own gradients; the global norm needs both. The
twin adds the squares over pp first.
Class: https://github.com/allenai/OLMo/pull/601, https://github.com/modelscope/twinkle/pull/290
(norm of the wrong set)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

LIMIT = 0.05


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6))
        self.rear = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.rear(self.front(x))


def get_inputs(step=0):
    return _noise(3600 + step, 6, 5)


def get_targets(step=0):
    return _noise(3630 + step, 6, 3)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    return value.detach()


def mesh_bad():
    return {"pp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    if mesh.get_local_rank("pp") == 0:
        model.rear = None
    else:
        model.front = None
    return model


parallelize_good = parallelize_bad


def _backward(model, batch):
    if model.front is not None:
        hidden = model.front(batch[0])
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)
        return None
    hidden = torch.empty(batch[0].shape[0], 6)
    dist.recv(hidden, 0)
    value = loss(model.rear(hidden.requires_grad_()), batch[1])
    value.backward()
    dist.send(hidden.grad, 0)
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = _backward(model, batch)
    clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    return value


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = _backward(model, batch)
    parameters = list(model.parameters())
    square = get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(square, group=mesh.get_group("pp"))
    clip_grads_with_norm_(parameters, LIMIT, square.sqrt())
    optimizer.step()
    return value


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip"],
        "stage": "clipping",
        "tensors": [
            "front.0.weight",
            "front.0.bias",
            "front.2.weight",
            "front.2.bias",
            "rear.0.weight",
            "rear.0.bias",
            "rear.1.weight",
            "rear.1.bias",
        ],
        "mentions": ["norm", "pp"],
    },
    "good": {"verdict": "pass"},
}
