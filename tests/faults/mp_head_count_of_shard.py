"""Projections under ColwiseParallel, but attention still views its input with the GLOBAL number of
heads: each local head is half as wide and mixes two halves of a true one. The twin divides the
number of heads by tp.
Class: https://github.com/pytorch/pytorch/issues/179502 (a view of a shard that goes through
wrongly)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 2
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8, bias=False)
        self.value = nn.Linear(8, 8)
        self.mixed = nn.Identity()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        layers = (self.query, self.key, self.value)
        q, k, v = (m(x).view(batch, length, self.heads, -1).transpose(1, 2) for m in layers)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(self.mixed(out.transpose(1, 2).reshape(batch, length, -1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.attn = Attention()
        self.score = nn.Linear(8, 1)

    def forward(self, ids):
        x = self.embed(ids)
        return self.score(x + self.attn(x)).squeeze(-1)


def get_inputs(step=0):
    return torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2500 + step))


def get_targets(step=0):
    return _noise(2530 + step, 3, 5).sigmoid()


def loss(output, targets):
    return F.binary_cross_entropy_with_logits(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=1.0, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    plan = {f"attn.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan["attn.proj"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def parallelize_good(model, mesh):
    model.attn.heads //= mesh.size()
    return parallelize_bad(model, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout", "unexplained"],
        "stage": "module_outputs",
        "tensors": ["attn.mixed"],
        "mentions": ["attn.mixed"],
    },
    "good": {"verdict": "pass"},
}
