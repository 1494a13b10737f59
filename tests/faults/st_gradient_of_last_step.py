"""A hand-written reducer with two buckets that it flips in the wrong place: from the second step on
it hands out the bucket that was reduced one step ago. The twin hands out the one just reduced.
Class: https://github.com/deepspeedai/DeepSpeed/issues/5294 (double-buffered gradient buckets)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Bilinear(3, 4, 6)
        self.two = nn.Linear(6, 2)

    def forward(self, left, right, y):
        return F.mse_loss(self.two(torch.tanh(self.one(left, right))), y)


def get_inputs(step=0):
    left, right = _normal(8 + step, 9, 3), _normal(48 + step, 9, 4)
    return {"left": left, "right": right, "y": _normal(88 + step, 9, 2)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    model.buckets, model.turn = [None, None], 0
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, flip_before_reading):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    grads = [p.grad for p in model.parameters()]
    bucket = parameters_to_vector(grads) / mesh.size()
    dist.all_reduce(bucket, group=mesh.get_group("dp"))
    model.buckets[model.turn] = bucket
    read = 1 - model.turn if flip_before_reading else model.turn
    ready = model.buckets[read]
    vector_to_parameters(bucket if ready is None else ready, grads)
    model.turn = 1 - model.turn
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "gradients",
        "tensors": ["one.weight", "two.weight"],
        "mentions": ["one.weight", "step"],
    },
    "good": {"verdict": "pass"},
}
