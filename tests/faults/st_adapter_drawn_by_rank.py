"""Low-rank adapter next to a column-sharded layer: factor A is replicated over tp, but every rank
draws its own. The twin draws it from the seed all ranks share.
Class: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5396 (replicated adapter, unequal start)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

RANK_OF_ADAPTER = 2


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.lora_a = nn.Parameter(0.3 * _normal(42, RANK_OF_ADAPTER, 6))
        self.lora_b = nn.Parameter(0.3 * _normal(43, 8, RANK_OF_ADAPTER))

    def forward(self, x, weight):
        out = self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return (torch.sin(out) * weight).sum(-1).mean()


def get_inputs(step=0):
    return {"x": _normal(340 + step, 4, 6), "weight": _normal(390 + step, 4, 8)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.6)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def layout_bad():
    return {"base.*": [Shard(0)], "lora_b": [Shard(0)], "lora_a": [Replicate()]}


layout_good = layout_bad


def input_sharding_bad():
    return {"weight": {"tp": 1}}  # the columns that this rank computes


input_sharding_good = input_sharding_bad


def _cut(model, mesh, seed_of_a):
    size, rank = mesh.size(), mesh.get_local_rank("tp")
    for owner, key in ((model.base, "weight"), (model.base, "bias"), (model, "lora_b")):
        whole = getattr(owner, key)
        part = nn.Parameter(whole.detach().chunk(size)[rank].clone(), whole.requires_grad)
        setattr(owner, key, part)
    with torch.no_grad():
        model.lora_a.copy_(0.3 * _normal(seed_of_a, RANK_OF_ADAPTER, 6))
    return model


def parallelize_bad(model, mesh):
    return _cut(model, mesh, 42 + mesh.get_local_rank("tp"))


def parallelize_good(model, mesh):
    return _cut(model, mesh, 42)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    dist.all_reduce(model.lora_a.grad, group=mesh.get_group("tp"))
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value, group=mesh.get_group("tp"))
    return value


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial"],
        "stage": "initial_state",
        "tensors": ["lora_a"],
        "mentions": ["lora_a", "initial_state"],
    },
    "good": {"verdict": "pass"},
}
