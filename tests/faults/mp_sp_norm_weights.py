"""Sequence parallelism by hand: each rank normalises its own tokens, so the gradient of the norm's
weights covers those tokens only. Nobody sums it over tp and the replicas drift apart. The twin sums
it before the optimizer.
Class: https://github.com/EleutherAI/gpt-neox/pull/1257,
https://github.com/Dao-AILab/flash-attention/issues/625
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -1.0, 1.0)

    def mix(self, tokens):
        return self.down(torch.sigmoid(self.up(tokens)))

    def forward(self, tokens, target):
        return (tokens + self.mix(self.norm(tokens)) - target).square().mean()


def get_inputs(step=0):
    return {"tokens": _noise(201 + step, 3, 8, 6), "target": _noise(231 + step, 3, 8, 6)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.8)


class _GatherTokens(torch.autograd.Function):
    """All tokens in forward; in backward the sum over ranks of the gradient, own tokens kept."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class _ReduceScatterTokens(torch.autograd.Function):
    """Sum over ranks in forward, own tokens kept; all tokens' gradient in backward."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        whole = whole.clone()
        dist.all_reduce(whole, group=group)
        return whole.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


def mesh_bad():
    return {"tp": 2}


def layout_bad():
    return {"up.*": [Shard(0)], "down.weight": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def parallelize_bad(model, mesh):
    group = mesh.get_group("tp")
    cuts = ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1))
    for owner, name, dim in cuts:
        piece = getattr(owner, name).detach().chunk(group.size(), dim)[group.rank()].clone()
        setattr(owner, name, nn.Parameter(piece))
    whole_mix = model.mix

    def mix(own_tokens):
        return _ReduceScatterTokens.apply(whole_mix(_GatherTokens.apply(own_tokens, group)), group)

    model.mix = mix
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, sum_norm):
    group = mesh.get_group("tp")
    own = {name: value.chunk(group.size(), 1)[group.rank()] for name, value in batch.items()}
    optimizer.zero_grad()
    loss = model(**own) / group.size()  # the share of this rank's tokens in the mean
    loss.backward()
    if sum_norm:
        for p in model.norm.parameters():
            dist.all_reduce(p.grad, group=group)
    optimizer.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, sum_norm=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, sum_norm=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["norm.weight", "norm.bias"],
        "mentions": ["norm.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
