"""False-alarm trap: experts on their own ranks, replicated tokens, a masked sum over ep; one expert
gets no token at all (its gradient is None or zero), and dense parameters are whole on every rank
without any reduction.
Compare https://github.com/databricks/megablocks/pull/20
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.router = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 2)
        self.router.bias.data[3] = -50.0  # expert 3 is never chosen

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        weight, choice = self.router(h).softmax(-1).max(-1)
        inner, out = self.enter(h), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            if expert is not None:
                out = out + F.gelu(expert(inner)) * (choice == number)[:, None]
        return self.head(h + self.leave(out) * weight[:, None])


def get_inputs(step=0):
    return _noise(5900 + step, 10, 4)


def get_targets(step=0):
    return _noise(5930 + step, 10, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_masked():
    return {"ep": 2}


def parallelize_masked(model, mesh):
    group = mesh.get_group("ep")
    for number in range(4):
        if number // 2 != group.rank():
            model.experts[number] = None
    model.enter = lambda x: _Enter.apply(x, group)
    model.leave = lambda x: _Leave.apply(x, group)
    return model


EXPECT = {"masked": {"verdict": "pass"}}
