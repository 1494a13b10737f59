"""Gradients are reduced in bfloat16: `bad_policy` by the reduce_dtype of fully_shard, `bad_hand` by
a cast around the all-reduce of four ranks. The twins reduce in the own type of the gradient.
Class: https://github.com/pytorch/pytorch/issues/106395 (16-bit reduction)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(2, 6, 3, stride=2)
        self.up = nn.ConvTranspose1d(6, 2, 3, stride=2)

    def forward(self, x):
        return self.up(F.hardswish(self.down(x)))


def get_inputs(step=0):
    return _normal(18 + step, 8, 2, 9)


def get_targets(step=0):
    return _normal(58 + step, 8, 2, 9)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def mesh_bad_hand():
    return {"dp": 4}


mesh_good_hand = mesh_bad_hand


def parallelize_bad_policy(model, mesh):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def parallelize_good_policy(model, mesh):
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())


def parallelize_bad_hand(model, mesh):
    return model


parallelize_good_hand = parallelize_bad_hand


def _train(model, optimizer, batch, mesh, wire_type):
    x, y = batch
    optimizer.zero_grad()
    value = loss(model(x), y)
    value.backward()
    for p in model.parameters():
        message = (p.grad / mesh.size()).to(wire_type or p.grad.dtype)
        dist.all_reduce(message, group=mesh.get_group("dp"))
        p.grad.copy_(message)
    optimizer.step()
    return value.detach()


def step_bad_hand(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, torch.bfloat16)


def step_good_hand(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, None)


_ROUNDED = {
    "verdict": "mismatch",
    "kind": ["precision"],
    "stage": "gradients",
    "tensors": ["down.weight", "up.weight"],
    "mentions": ["down.weight", "bfloat16"],
}

EXPECT = {
    "bad_policy": _ROUNDED,
    "good_policy": {"verdict": "pass"},
    "bad_hand": _ROUNDED,
    "good_hand": {"verdict": "pass"},
}
