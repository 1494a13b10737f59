"""Fused query-key-value projection under ColwiseParallel on a dp x tp mesh. The output stays local
and is cut with `chunk(3)`: rank 0 takes half of the queries for keys. The twin keeps a DTensor
until after the cut.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/1324
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self, width=8, head=2):
        super().__init__()
        self.head = head
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Identity()
        self.proj = nn.Linear(width, width)

    def split(self, fused):
        return fused.chunk(3, -1)

    def forward(self, x):
        parts = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.split(self.qkv(x)))
        out = F.scaled_dot_product_attention(*parts)
        return self.proj(self.mix(out.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(x + self.attn(x)).mean(1)


def get_inputs(step=0):
    return _noise(2100 + step, 4, 5, 8)


def get_targets(step=0):
    return torch.randint(0, 3, (4,), generator=torch.Generator().manual_seed(2130 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, foreach=False)


def mesh_bad():
    return {"dp": 2, "tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    plan = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def parallelize_good(model, mesh):
    whole = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"attn.qkv": whole, "attn.proj": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)

    def split(fused):
        parts = fused.chunk(3, -1)
        return [part.redistribute(placements=[Shard(2)]).to_local() for part in parts]

    model.attn.split = split
    return model


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grad.div_(2)
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["attn.mix"],
        "mentions": ["attn.mix", "tp", "block order 0, 3, 1, 4, 2, 5"],
    },
    "good": {"verdict": "pass"},
}
