"""A cross entropy made for logits cut by vocabulary is fed with logits that were already gathered:
the normaliser sums the same exponentials on every rank, so the loss is too large by ln(tp).
Class: https://github.com/apple/ml-cross-entropy/pull/42 (vocabulary-parallel losses)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

VOCAB = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCAB)

    def cost(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids):
        return self.cost(self.head(self.norm(self.embed(ids[:, :-1]))), ids[:, 1:])


def get_inputs(step=0):
    source = torch.Generator().manual_seed(2000 + step)
    return {"ids": torch.randint(0, VOCAB, (4, 6), generator=source)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.3)


class _AddForward(torch.autograd.Function):
    """Sum over ranks in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _AddBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    """All columns in forward, own columns in backward."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def _vocabulary_loss(logits, labels, group, first):
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    total = _AddForward.apply((logits - top).exp().sum(-1), group)
    per_rank = VOCAB // group.size()
    mine = (labels >= first) & (labels < first + per_rank)
    start = first if logits.shape[-1] == per_rank else 0
    column = (labels - start).clamp(0, logits.shape[-1] - 1)
    picked = (logits - top).gather(-1, column[..., None])[..., 0] * mine
    return (total.log() - _AddForward.apply(picked, group)).mean()


def mesh_bad():
    return {"tp": 2}


def layout_bad():
    return {"head.*": [Shard(0)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _columns(model, group):
    head = model.head
    for name, p in list(head.named_parameters()):
        own = p.detach().chunk(group.size(), 0)[group.rank()].clone()
        setattr(head, name, nn.Parameter(own))
    head.forward = lambda h: F.linear(_AddBackward.apply(h, group), head.weight, head.bias)
    return group.rank() * VOCAB // group.size()


def parallelize_bad(model, mesh):
    group = mesh.get_group("tp")
    first = _columns(model, group)

    def cost(logits, labels):
        return _vocabulary_loss(_Gather.apply(logits, group), labels, group, first)

    model.cost = cost
    return model


def parallelize_good(model, mesh):
    group = mesh.get_group("tp")
    first = _columns(model, group)
    model.cost = lambda logits, labels: _vocabulary_loss(logits, labels, group, first)
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss", "ln", "tp"],
    },
    "good": {"verdict": "pass"},
}
