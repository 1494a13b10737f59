"""The style multiplies the learning rate by the number of ranks although the global batch is the
same: the linear scaling rule without a larger batch. The twin leaves it alone.
Class: https://github.com/speechbrain/speechbrain/issues/899 (one device and many, other schedules)
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
        self.first = nn.Conv1d(2, 4, 2)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 3)

    def forward(self, x, y):
        h = self.norm(torch.sin(2 * self.first(x)).mean(-1))
        return F.cross_entropy(self.second(h), y)


def get_inputs(step=0):
    labels = torch.randint(0, 3, (9,), generator=torch.Generator().manual_seed(26 + step))
    return {"x": _normal(27 + step, 9, 2, 6), "y": labels}


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.005)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    model = fully_shard(model, mesh=mesh)
    optimizer = get_optimizer(list(model.parameters()))
    for settings in optimizer.param_groups:
        settings["lr"] *= mesh.size()
    return model, optimizer


def setup_good(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, get_optimizer(list(model.parameters()))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "inputs",
        "tensors": ["first.weight", "second.weight"],
        "mentions": ["lr", "0.015", "0.005"],
    },
    "good": {"verdict": "pass"},
}
