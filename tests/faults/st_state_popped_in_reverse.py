"""After each step the momenta are re-partitioned: filed by shape, handed out again with `pop()`,
last first, so equally shaped layers trade momenta. The twin takes them first to last.
Class: https://github.com/databricks/flashoptim/issues/3 (state without names after a round trip)
"""

from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 6)
        self.low = nn.Linear(6, 6)
        self.mid = nn.Linear(6, 6)
        self.top = nn.Linear(6, 6)

    def forward(self, x, y):
        h = self.lift(x)
        for layer in (self.low, self.mid, self.top):
            h = h + torch.tanh(layer(h))
        return (h - y).square().mean()


def get_inputs(step=0):
    return {"x": _normal(1 + step, 4, 4), "y": _normal(51 + step, 4, 6)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.8, nesterov=True)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _repartition(optimizer, take):
    shelves = defaultdict(list)
    params = [p for settings in optimizer.param_groups for p in settings["params"]]
    for p in params:
        shelves[tuple(p.shape)].append(optimizer.state[p]["momentum_buffer"].clone())
    for p in params:
        optimizer.state[p]["momentum_buffer"] = take(shelves[tuple(p.shape)])


def _train(model, optimizer, batch, take):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    _repartition(optimizer, take)
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda shelf: shelf.pop())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda shelf: shelf.pop(0))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_state", "layout"],
        "stage": "optimizer_state",
        "tensors": ["low.weight", "top.weight"],
        "mentions": ["low.weight", "top.weight", "momentum_buffer"],
    },
    "good": {"verdict": "pass"},
}
