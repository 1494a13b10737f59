"""fully_shard with a branch that this task does not use: "so that all ranks have all gradients" the
missing ones are filled with zeros, and weight decay shrinks the idle branch, which one device
skips. Class: https://github.com/facebookresearch/fairscale/issues/605 (gradient None or zero)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.regress = nn.Linear(6, 3)
        self.classify = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x, y):
        return F.mse_loss(self.regress(torch.tanh(self.trunk(x))), y)


def get_inputs(step=0):
    return {"x": _normal(132 + step, 6, 4), "y": _normal(142 + step, 6, 3)}


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.3)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, fill):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    for p in model.parameters():
        if fill and p.grad is None:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused"],
        "stage": ["gradients", "optimizer_state", "parameters"],
        "tensors": ["classify.0.weight", "classify.2.weight"],
        "mentions": ["classify.0.weight"],
    },
    "good": {"verdict": "pass"},
}
