"""Training is right, the returned loss is not: `bad_norm` adds the norm of a sharded weight read by
float() (this rank's rows), `bad_first` tells everyone rank 0's loss. The twin reduces and gathers.
Class: https://github.com/pytorch/pytorch/issues/144054 (item() of a sharded result is local)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.onto = nn.Linear(8, 2)

    def forward(self, x, y):
        return F.mse_loss(self.onto(torch.cos(self.into(x))), y)


def get_inputs(step=0):
    scale = torch.tensor([1.0, 1.0, 3.0, 3.0])[:, None]
    return {"x": _normal(101 + step, 4, 4), "y": scale * _normal(201 + step, 4, 2)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.02)


def _train(model, optimizer, batch):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    value = _train(model, optimizer, batch)
    with torch.no_grad():
        return value + 0.01 * float(model.into.weight.norm())


def parallelize_bad_norm(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_bad_first = parallelize_good = parallelize_bad_norm


def step_bad_norm(model, optimizer, batch, mesh):
    return step(model, optimizer, batch)


def step_bad_first(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch)
    dist.broadcast(value, group=mesh.get_group("dp"), group_src=0)
    return value + 0.01 * _whole_norm(model)


def step_good(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch)
    dist.all_reduce(value.div_(mesh.size()), group=mesh.get_group("dp"))
    return value + 0.01 * _whole_norm(model)


@torch.no_grad()
def _whole_norm(model):
    return model.into.weight.full_tensor().norm()


_REPORT_ONLY = {
    "verdict": "mismatch",
    "kind": ["reported_value"],
    "stage": "loss",
    "tensors": [],
    "mentions": ["loss"],
}

EXPECT = {
    "bad_norm": _REPORT_ONLY,
    "bad_first": _REPORT_ONLY,
    "good": {"verdict": "pass"},
}
