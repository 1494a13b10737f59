"""Sequence shards on a dp x sp mesh add learned positions that count from 0 on every rank of sp:
the last half of every sample is wrong, whatever the axis of samples.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/2377
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mix = Mix()
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)))


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(8, 6))
        self.start = 0

    def forward(self, x):
        return x + self.pos[self.start : self.start + x.shape[1]]


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.7)


def mesh_bad():
    return {"dp": 2, "sp": 2}


def mesh_good():
    return {"dp": 2, "sp": 2}


def input_sharding_bad():
    return {"ids": {"dp": 0, "sp": 1}, "targets": {"dp": 0, "sp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(m, mesh):
    return m


def parallelize_good(m, mesh):
    m.mix.start = 4 * mesh.get_local_rank("sp")
    return m


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    v = v.detach().clone()
    for t in [v, *(p.grad for p in model.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    optimizer.step()
    return v


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "module_outputs",
        "tensors": ["mix"],
        "mentions": ["mix", "indices 4-7 of dim 1", "local to sp"],
        "never": ["of dim 0"],
    },
    "good": {"verdict": "pass"},
}
