"""The gradient norm kept for the log is read with float() from a norm that is still a partial sum,
so each rank stores its own shard's. Training is right. The twin reads the full tensor.
Class: https://github.com/radixark/miles_diffusion/pull/35 and https://github.com/pytorch/pytorch/issues/144054
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("grad_norm", torch.zeros(()))

    def forward(self, x):
        return self.last(F.selu(self.first(x)))


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(12200 + step))


def get_targets(step=0):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(12300 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02)


def _train(model, optimizer, batch, whole):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    norms = [float(whole(torch.linalg.vector_norm(p.grad))) for p in model.parameters()]
    model.grad_norm.fill_(math.hypot(*norms))
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, lambda norm: norm)


def mesh_bad():
    return {"fsdp": 2}


def parallelize_bad(model, mesh):
    return fully_shard(model, mesh=mesh)


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda norm: norm)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda norm: norm.full_tensor())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["reported_value", "buffer"],
        "stage": "buffers",
        "tensors": ["grad_norm"],
        "mentions": ["grad_norm"],
    },
    "good": {"verdict": "pass"},
}
