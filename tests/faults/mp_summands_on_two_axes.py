"""Tensor parallelism within data parallelism, by hand. What leaves `down` is a part of the batch
along dp and a summand along tp, as it should be. The fault is in backward only: the gradient that
the second block's norm gets is this rank's summand, as the sum over tp was left out in front.
Class: https://github.com/EleutherAI/gpt-neox/pull/1257
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6, False)

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def forward(self, x):
        return x + self.leave(self.down(torch.sigmoid(self.up(self.enter(self.norm(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def get_inputs(step=0):
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(2500 + step))]


def get_targets(step=0):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(2550 + step))


def loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


class _Sum(torch.autograd.Function):
    """The sum over ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward = group, in_forward
        x = x.clone()
        if in_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if not ctx.in_forward:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def mesh_bad():
    return {"dp": 2, "tp": 2}


def layout_bad():
    return {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallel(model, mesh, left_out):
    group = mesh.get_group("tp")
    for i, block in enumerate(model.blocks):
        for owner, name, dim in ((block.up, "weight", 0), (block.up, "bias", 0),
                                 (block.down, "weight", 1)):  # fmt: skip
            own = getattr(owner, name).detach().chunk(group.size(), dim)[group.rank()]
            setattr(owner, name, nn.Parameter(own.clone()))
        if i != left_out:
            block.enter = lambda x: _Sum.apply(x, group, False)
        block.leave = lambda x: _Sum.apply(x, group, True)
    return model


def parallelize_bad(model, mesh):
    return _parallel(model, mesh, 1)


def parallelize_good(model, mesh):
    return _parallel(model, mesh, None)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh["dp"].size()
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["blocks.1.norm.weight", "blocks.1.norm.bias"],
        "mentions": ["tp"],
    },
    "good": {"verdict": "pass"},
}
