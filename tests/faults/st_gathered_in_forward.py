"""ZeRO-3 by hand: weights are rows per rank and gathered where they are used. The gather puts the
parts together in another order, uses a rank's own rows in all places, loses a rank's rows, or
scales them.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def get_inputs(step=0):
    return [torch.randn(9, 5, generator=torch.Generator().manual_seed(8100 + step))]


def get_targets(step=0):
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(8150 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02)


def mesh_right():
    return {"dp": 3}


mesh_reversed = mesh_own = mesh_lost = mesh_scaled = mesh_right


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, put):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(put(parts, dist.get_rank()))

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        size = dist.get_world_size()
        return gradient.chunk(size)[dist.get_rank()] / size, None


class Rows(nn.Module):
    def __init__(self, whole, put):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        for name in ("weight", "bias"):
            part = getattr(whole, name).detach().chunk(size)[rank].clone()
            setattr(self, name, nn.Parameter(part))
        self.put = put

    def forward(self, x):
        bias = Gathered.apply(self.bias, lambda parts, rank: parts)
        return F.linear(x, Gathered.apply(self.weight, self.put), bias)


def _sharded(model, put):
    model.first = Rows(model.first, lambda parts, rank: parts)
    model.last = Rows(model.last, put)
    return model


def parallelize_right(model, mesh):
    return _sharded(model, lambda parts, rank: parts)


def parallelize_reversed(model, mesh):
    return _sharded(model, lambda parts, rank: parts[::-1])


def parallelize_own(model, mesh):
    return _sharded(model, lambda parts, rank: [parts[rank]] * len(parts))


def parallelize_lost(model, mesh):
    return _sharded(model, lambda parts, rank: [*parts[:-1], torch.zeros_like(parts[-1])])


def parallelize_scaled(model, mesh):
    return _sharded(model, lambda parts, rank: [1.25 * part for part in parts])


_AT = {
    "verdict": "mismatch",
    "stage": "module_outputs",
    "tensors": ["last", "last.weight"],
}
EXPECT = {
    "right": {"verdict": "pass"},
    "reversed": {**_AT, "kind": ["layout"], "mentions": ["reverse order", "dp"]},
    "own": {**_AT, "kind": ["layout"], "mentions": ["its own part", "dp"]},
    "lost": {**_AT, "kind": ["factor"], "mentions": ["without the part of rank 2 of dp"]},
    "scaled": {**_AT, "kind": ["factor"], "mentions": ["1.25"]},
}
