"""Multi-query attention: query heads are spread over tp, the one key/value head is on every rank,
and its projection gets the gradient of the local query heads only. The twin sums it over tp.
Class: https://github.com/bigcode-project/Megatron-LM/pull/37
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


class SharedHeadAttention(nn.Module):
    def __init__(self, width=8, heads=4):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.keyvalue = nn.Linear(width, 2 * self.head_width)
        self.proj = nn.Linear(width, width, bias=False)

    def attend(self, x):
        q = self.query(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        k, v = self.keyvalue(x).unsqueeze(1).chunk(2, -1)
        k, v = k.expand_as(q), v.expand_as(q)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attn = SharedHeadAttention()
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids[:, :-1])
        return self.head(x + self.attn(x)), ids[:, 1:]


def loss(output):
    logits, labels = output
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def get_inputs(step=0):
    return torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(310 + step))


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3, weight_decay=0.05)


class _Enter(torch.autograd.Function):
    """Identity in forward, sum over the ranks in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Sum over the ranks in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad():
    return {"tp": 4}


def layout_bad():
    return {"attn.query.*": [Shard(0)], "attn.proj.weight": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def parallelize_bad(model, mesh):
    group, attn = mesh.get_group("tp"), model.attn

    def own(tensor, dim):
        return nn.Parameter(tensor.detach().chunk(group.size(), dim)[group.rank()].clone())

    attn.query.weight, attn.query.bias = own(attn.query.weight, 0), own(attn.query.bias, 0)
    attn.proj.weight = own(attn.proj.weight, 1)
    attn.forward = lambda x: _Leave.apply(attn.attend(_Enter.apply(x, group)), group)
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, shared):
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    for p in shared:
        dist.all_reduce(p.grad, group=mesh.get_group("tp"))
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, shared=[])


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, shared=list(model.attn.keyvalue.parameters()))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["attn.keyvalue.weight", "attn.keyvalue.bias"],
        "mentions": ["attn.keyvalue.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
