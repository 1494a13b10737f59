"""Learned positions on a dp x sp mesh: every sequence shard looks up rows 0, 1, 2 of the position
table. Rows of the second half never train. The twin adds the shard's start.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/2377 (positions that ignore where the shard
begins)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

LENGTH = 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = 0
        self.token = nn.Embedding(8, 5)
        self.position = nn.Embedding(LENGTH, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 8)

    def forward(self, ids):
        rows = torch.arange(ids.shape[1]) + self.start
        return self.head(self.norm(self.token(ids) + self.position(rows)))


def get_inputs(step=0):
    return torch.randint(0, 8, (4, LENGTH), generator=torch.Generator().manual_seed(2700 + step))


def get_targets(step=0):
    return torch.randint(0, 8, (4, LENGTH), generator=torch.Generator().manual_seed(2730 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.02, eps=1e-3)


def mesh_bad():
    return {"dp": 2, "sp": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"ids": {"dp": 0, "sp": 1}, "targets": {"dp": 0, "sp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model)


def parallelize_good(model, mesh):
    model.start = LENGTH // mesh["sp"].size() * mesh.get_local_rank("sp")
    return DistributedDataParallel(model)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / mesh.size()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "module_outputs",
        "tensors": ["position"],
        "mentions": ["position", "sp"],
    },
    "good": {"verdict": "pass"},
}
