"""fully_shard with clipping by hand on `p.grad.to_local()`: every rank takes the norm of its own
shards and shrinks by its own factor. The twin sums the squares over the shard group.
Class: https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MAX_NORM = 0.3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.gate = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 4)

    def forward(self, x):
        return self.outer(F.silu(self.gate(x)) * self.inner(x))


def get_inputs(step=0):
    return 2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(8800 + step))


def get_targets(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(8900 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.6, momentum=0.3)


def _train(model, optimizer, batch, group=None):
    x, wanted = batch
    optimizer.zero_grad()
    value = loss(model(x), wanted)
    value.backward()
    grads = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    squares = sum(g.square().sum() for g in grads)
    if group is not None:
        dist.all_reduce(squares, group=group)
    for g in grads:
        g.mul_((MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0))
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch)


def mesh_bad():
    return {"fsdp": 2}


def parallelize_bad(model, mesh):
    return fully_shard(model, mesh=mesh)


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh.get_group("fsdp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip", "factor"],
        "stage": ["gradients", "clipping"],
        "tensors": ["inner.weight", "gate.weight", "outer.weight"],
        "mentions": ["inner.weight"],
    },
    "good": {"verdict": "pass"},
}
