"""Grouped-query attention, four query heads on two key/value heads. `bad` deals the query heads out
round robin (0, 2 and 1, 3) but the key/value heads in blocks, so half of the queries meet the wrong
keys. Every shard gathers back right.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/1324 (head layout that does not survive
sharding)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

HEAD = 3


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class GroupedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4 * HEAD)
        self.key = nn.Linear(6, 2 * HEAD, bias=False)
        self.value = nn.Linear(6, 2 * HEAD)
        self.mixed = nn.Identity()
        self.proj = nn.Linear(4 * HEAD, 6, bias=False)

    def forward(self, x):
        layers = (self.query, self.key, self.value)
        q, k, v = (m(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in layers)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(self.mixed(out.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = GroupedAttention()
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x, y):
        return F.smooth_l1_loss(self.attn(x) + self.shift, y)


def get_inputs(step=0):
    return {"x": _noise(2300 + step, 3, 5, 6), "y": _noise(2330 + step, 3, 5, 6)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.8)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def _parallelize(model, mesh, query_heads):
    group, attn = mesh.get_group("tp"), model.attn

    def heads(tensor, numbers, dim):
        blocks = tensor.detach().split(HEAD, dim)
        return nn.Parameter(torch.cat([blocks[n] for n in numbers], dim))

    own = [group.rank()]
    attn.query.weight = heads(attn.query.weight, query_heads, 0)
    attn.query.bias = heads(attn.query.bias, query_heads, 0)
    attn.key.weight = heads(attn.key.weight, own, 0)
    attn.value.weight = heads(attn.value.weight, own, 0)
    attn.value.bias = heads(attn.value.bias, own, 0)
    attn.proj.weight = heads(attn.proj.weight, query_heads, 1)
    attn.proj.forward = lambda h: _Leave.apply(F.linear(h, attn.proj.weight), group)
    return model


def parallelize_bad(model, mesh):
    rank = mesh.get_local_rank("tp")
    return _parallelize(model, mesh, (rank, rank + 2))


def parallelize_good(model, mesh):
    rank = mesh.get_local_rank("tp")
    return _parallelize(model, mesh, (2 * rank, 2 * rank + 1))


def gather_good(name, local_tensors):
    if not name.startswith("attn"):
        return local_tensors[0]
    return torch.cat(local_tensors, 1 if name == "attn.proj.weight" else 0)


def gather_bad(name, local_tensors):
    whole = gather_good(name, local_tensors)
    if "query" not in name and "proj" not in name:
        return whole
    dim = 1 if "proj" in name else 0
    blocks = whole.split(HEAD, dim)  # heads 0, 2, 1, 3
    return torch.cat([blocks[n] for n in (0, 2, 1, 3)], dim)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["attn.mixed"],
        "mentions": ["attn", "tp"],
    },
    "good": {"verdict": "pass"},
}
