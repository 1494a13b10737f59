"""fully_shard, then initialise in place, as after a meta-device build: on a CPU mesh every shard
draws the same numbers, so the halves of a matrix repeat. The twin draws whole tensors from the
seed and distributes them. Class: https://github.com/pytorch/pytorch/issues/168058
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(6, 8)
        self.join = nn.Linear(8, 2)
        for seed, name in enumerate(("left", "right", "join")):
            weight = getattr(self, name).weight
            weight.data = 0.4 * _normal(seed, *weight.shape)

    def forward(self, x, y):
        return F.mse_loss(self.join(torch.tanh(self.left(x)) * self.right(x)), y)


def get_inputs(step=0):
    return {"x": _normal(70 + step, 4, 6), "y": _normal(75 + step, 4, 2)}


def get_optimizer(params):
    return torch.optim.Adamax(params, lr=0.02, eps=1e-4)


def _weights(model):
    return enumerate((model.left.weight, model.right.weight, model.join.weight))


@torch.no_grad()
def parallelize_bad(model, mesh):
    fully_shard(model, mesh=mesh)
    for seed, weight in _weights(model):
        torch.manual_seed(seed)
        nn.init.normal_(weight, std=0.4)
    return model


@torch.no_grad()
def parallelize_good(model, mesh):
    fully_shard(model, mesh=mesh)
    for seed, weight in _weights(model):
        whole = (0.4 * _normal(seed, *weight.shape)).to(weight.dtype)
        weight.copy_(distribute_tensor(whole, mesh, weight.placements))
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial", "random_stream"],
        "stage": "initial_state",
        "tensors": ["left.weight", "right.weight", "join.weight"],
        "mentions": ["left.weight", "initial_state"],
    },
    "good": {"verdict": "pass"},
}
