"""False-alarm trap: clip_grad_norm_ on fully_shard parameters over one and two axes, 2-norm and
largest element, always active. The norm is that of the whole gradient on every rank.
Compare https://github.com/radixark/miles_diffusion/pull/35 (local norm in the log)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 11)

    def forward(self, ids):
        return self.outer(F.gelu(self.inner(self.table(ids))))


def _ids(seed):
    return torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(430 + step)


def get_targets(step=0):
    return _ids(440 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=1.0, momentum=0.9)


def step(model, optimizer, batch):
    ids, targets = batch
    optimizer.zero_grad()
    value = loss(model(ids), targets)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    optimizer.step()
    return value.detach()


def mesh_hybrid():
    return {"replicate": 2, "shard": 2}


def mesh_four():
    return {"dp": 4}


def parallelize_two(model, mesh):
    return fully_shard(model, mesh=mesh)


def parallelize_four(model, mesh):
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


parallelize_hybrid = parallelize_two

EXPECT = {name: {"verdict": "pass"} for name in ("two", "four", "hybrid")}
