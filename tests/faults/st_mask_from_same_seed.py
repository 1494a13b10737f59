"""Dropout under data parallel: all ranks draw for their own rows from one seed, so rank 1 repeats
the mask of rank 0. The twin draws the mask of the whole batch and takes its rows.
Class: https://github.com/ecmwf/anemoi-core/issues/595 (correlated dropout masks)
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
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 3)

    def keep(self, rows, columns):
        return torch.rand(rows, columns) < 0.6

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.second(h * self.keep(*h.shape) / 0.6)


def get_inputs(step=0):
    return _normal(808 + step, 8, 6)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(858 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_good(model, mesh):
    size, rank = mesh.size(), mesh.get_local_rank("dp")
    draw = model.keep
    model.keep = lambda rows, columns: draw(rows * size, columns).chunk(size)[rank]
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["random_stream"],
        "stage": ["module_outputs", "loss"],
        "tensors": ["first.weight", "second.weight"],
        "mentions": ["second", "random"],
    },
    "good": {"verdict": "pass"},
}
