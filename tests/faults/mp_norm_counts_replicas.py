"""Gradient clipping under tensor parallelism: the squares of ALL gradients are summed over tp, also
those of parameters every rank holds whole. The norm is too large and everything is clipped too
hard. The twin counts replicas once.
Class: https://github.com/ROCm/TransformerEngine/pull/715
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

LIMIT = 0.1


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 6)
        self.back = nn.Linear(6, 4)

    def leave(self, h):
        return self.back(h)

    def forward(self, x):
        return self.leave(torch.sigmoid(self.wide(x)))


def get_inputs(step=0):
    return _noise(6400 + step, 6, 5)


def get_targets(step=0):
    return _noise(6430 + step, 6, 4)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    return value.detach()


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
    return {"tp": 3}


def layout_bad():
    return {"wide.*": [Shard(0)], "back.weight": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def parallelize_bad(model, mesh):
    group, wide, back = mesh.get_group("tp"), model.wide, model.back
    for owner, name, dim in ((wide, "weight", 0), (wide, "bias", 0), (back, "weight", 1)):
        own = getattr(owner, name).detach().chunk(group.size(), dim)[group.rank()]
        setattr(owner, name, nn.Parameter(own.clone()))
    model.leave = lambda h: _Leave.apply(F.linear(h, back.weight), group) + back.bias
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, whole):
    """`whole` names what is counted once."""
    group = mesh.get_group("tp")
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    square = torch.zeros(())
    for name, p in model.named_parameters():
        share = group.size() if name in whole else 1
        square += p.grad.square().sum() / share
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(list(model.parameters()), LIMIT, square.sqrt())
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, whole=())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, whole=("back.bias",))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip"],
        "stage": "clipping",
        "tensors": ["wide.weight", "wide.bias", "back.weight", "back.bias"],
        "mentions": ["norm", "tp"],
    },
    "good": {"verdict": "pass"},
}
