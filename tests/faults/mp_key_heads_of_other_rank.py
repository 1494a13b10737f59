"""Grouped-query attention over tp with keys and values on every rank: a rank picks the key head of
its neighbour, or its rank modulo the number of key heads.
Class: https://github.com/bigcode-project/Megatron-LM/pull/37 (shared key and value heads)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

HD = 3


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4 * HD)
        self.key = nn.Linear(6, 2 * HD)
        self.value = nn.Linear(6, 2 * HD)
        self.proj = nn.Linear(4 * HD, 6, bias=False)
        self.tiled = False
        self.leave = lambda x: x
        self.pick = lambda k: k

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            f(x).view(b, t, -1, HD).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        k, v = (self.pick(k), self.pick(v))
        n = q.shape[1] // k.shape[1]
        if self.tiled:
            k, v = (k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1))
        else:
            k, v = (k.repeat_interleave(n, 1), v.repeat_interleave(n, 1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(self.proj(y.transpose(1, 2).reshape(b, t, -1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.attn = Attn()
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attn(x))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.5)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        t = p.clone()
        dist.all_reduce(t, group=g)
        return t

    @staticmethod
    def backward(ctx, grad):
        return (grad, None)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, g):
        ctx.g = g
        return p.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.g)
        return (grad, None)


def mesh_bad():
    return {"tp": 2}


def mesh_good():
    return {"tp": 4}


def mesh_bad_four():
    return {"tp": 4}


L = {"attn.query.*": {"tp": Shard(0)}, "attn.proj.weight": {"tp": Shard(1)}}


def layout_bad_four():
    return L


layout_good = layout_bad_four


def layout_bad():
    return L


def _cut(m, mesh, kv):
    g = mesh.get_group("tp")
    r, n = (g.rank(), g.size())
    a = m.attn
    for o, name, dim in ((a.query, "weight", 0), (a.query, "bias", 0), (a.proj, "weight", 1)) + (
        ((a.key, "weight", 0), (a.key, "bias", 0), (a.value, "weight", 0), (a.value, "bias", 0))
        if kv
        else ()
    ):
        setattr(o, name, nn.Parameter(getattr(o, name).detach().chunk(n, dim)[r].clone()))
    f = a.forward
    a.forward = lambda x: f(_Copy.apply(x, g))
    a.leave = lambda x: _Sum.apply(x, g)
    return (m, r, n)


def parallelize_good(m, mesh):
    m, r, n = _cut(m, mesh, False)
    m.attn.pick = lambda k: k[:, r * 2 // n : r * 2 // n + 1]
    return m


def parallelize_bad(m, mesh):
    m, r, _ = _cut(m, mesh, False)
    m.attn.pick = lambda k: k[:, 1 - r : 2 - r]
    return m


def parallelize_bad_four(m, mesh):
    m, r, _ = _cut(m, mesh, False)
    m.attn.pick = lambda k: k[:, r % 2 : r % 2 + 1]
    return m


def _kv(model, mesh):
    g = mesh.get_group("tp")
    for n, p in model.named_parameters():
        if "key" in n or "value" in n:
            dist.all_reduce(p.grad, group=g)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    _kv(model, mesh)
    optimizer.step()
    return v.detach()


step_bad_four = step_bad
step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["attn.proj"],
        "mentions": ["attn.key.weight", "tp"],
    },
    "bad_four": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["attn.proj"],
        "mentions": ["attn.query.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
