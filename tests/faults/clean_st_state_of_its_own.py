"""False-alarm trap: the optimizer keeps its momenta where nobody looks - in a list, or in an object
of its own - instead of `state`, cut as the shards are cut. Parameters are right.
Compare https://github.com/NVIDIA/Megatron-LM/issues/5974 (what an optimizer reads)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 6)
        self.mul = nn.Linear(4, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.lin(x)) * torch.sigmoid(self.mul(x)))


def get_inputs(step=0):
    return _normal(99 + step, 8, 4)


def get_targets(step=0):
    return _normal(199 + step, 8, 3)


def loss(output, targets):
    return F.mse_loss(output, targets)


class _Memory:
    def __init__(self):
        self.tensors = []


class HiddenMomentum(torch.optim.Optimizer):
    def __init__(self, params, memory=None):
        super().__init__(params, {"lr": 0.1, "momentum": 0.8})
        self.memory = memory
        self.momenta = []

    @torch.no_grad()
    def step(self, closure=None):
        kept = self.momenta if self.memory is None else self.memory.tensors
        for settings in self.param_groups:
            for index, p in enumerate(settings["params"]):
                w, g = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
                if len(kept) <= index:
                    kept.append(torch.zeros_like(g))
                kept[index].mul_(settings["momentum"]).add_(g)
                w.sub_(settings["lr"] * kept[index])


def get_optimizer(params):
    return HiddenMomentum(params)


def setup_in_list(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, HiddenMomentum(model.parameters())


def setup_in_object(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, HiddenMomentum(model.parameters(), _Memory())


EXPECT = {"in_list": {"verdict": "pass"}, "in_object": {"verdict": "pass"}}
