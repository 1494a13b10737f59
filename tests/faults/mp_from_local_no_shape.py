"""Five samples on two ranks (three and two) wrapped with `DTensor.from_local` without a shape: rank
0 believes in six rows, rank 1 in four, and their means divide by different numbers. The twin gives
shape and stride.
Class: https://github.com/pytorch/pytorch/issues/162692,
https://github.com/pytorch/pytorch/issues/172812
"""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def get_inputs(step=0):
    return _noise(3900 + step, 5, 4)


def get_targets(step=0):
    return _noise(3930 + step, 5, 3)


def loss(output, targets):
    return (output - targets).square().mean()


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, foreach=False)


def mesh_bad():
    return {"dp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    for layer in (model.inner, model.outer):
        for name, p in list(layer.named_parameters()):
            whole = distribute_tensor(p.detach(), mesh, [Replicate()])
            setattr(layer, name, nn.Parameter(whole))
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, rows):
    def wrap(local):
        if rows is None:
            return DTensor.from_local(local, mesh, [Shard(0)])
        shape, stride = (rows, local.shape[1]), (local.shape[1], 1)
        return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)

    optimizer.zero_grad()
    value = loss(model(wrap(batch[0])), wrap(batch[1]))
    value.backward()
    optimizer.step()
    return value.detach().full_tensor()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, rows=None)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, rows=5)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["uneven", "mean_of_means"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss", "5"],
    },
    "good": {"verdict": "pass"},
}
