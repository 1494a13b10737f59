"""Sequence parallelism with DTensor: the gradient of a SequenceParallel norm is already complete
over tp. A loop kept from hand-written times sums the norms' gradients once more. The twin leaves
them alone.
Class: https://github.com/NVIDIA/Megatron-LM/pull/6839 (a reduction that counts double once the
other mode does it)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.back(F.silu(self.wide(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def get_inputs(step=0):
    return {"x": _noise(4000 + step, 2, 4, 6), "y": _noise(4030 + step, 2, 4, 6)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    whole, cut = Replicate(), Shard(1)
    plan = {"blocks.0": PrepareModuleInput(input_layouts=whole, desired_input_layouts=cut)}
    for number, out in enumerate((cut, whole)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.wide"] = ColwiseParallel(input_layouts=cut)
        plan[f"blocks.{number}.back"] = RowwiseParallel(output_layouts=out)
    return parallelize_module(model, mesh, plan)


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    for name, p in model.named_parameters():
        if ".norm." in name:
            p.grad = p.grad.redistribute(placements=[Replicate()])
            dist.all_reduce(p.grad.to_local(), group=mesh.get_group("tp"))
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    return value.detach()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction", "factor"],
        "stage": "gradients",
        "tensors": [f"blocks.{n}.norm.{part}" for n in (0, 1) for part in ("weight", "bias")],
        "mentions": ["blocks.0.norm.weight", "2", "tp"],
    },
    "good": {"verdict": "pass"},
}
