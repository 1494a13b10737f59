"""Sequence cut over sp; hidden states are gathered and the whole loss is computed on every rank.
The gather's backward only slices (`bad_slice`), while the wrapper averages gradients over all
ranks: they end up sp times too small. In `bad_avg` the gradient is divided by the axis size and
then averaged as Partial("avg").
Class: https://github.com/ByteDance-Seed/VeOmni/pull/1120
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def join(self, hidden):
        return hidden

    def forward(self, x, y):
        pooled = self.join(torch.tanh(self.proj(x)) * self.scale).logsumexp(1)
        return F.l1_loss(pooled, y) + pooled.square().mean()


def get_inputs(step=0):
    return {"x": _noise(1500 + step, 4, 6, 4), "y": _noise(1530 + step, 4, 6)}


def get_optimizer(params):
    return torch.optim.NAdam(params, lr=0.01, eps=1e-2)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, add):
        ctx.group, ctx.add = group, add
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.add:
            dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None, None


def mesh_bad_slice():
    return {"sp": 3}


def mesh_bad_avg():
    return {"sp": 2}


mesh_good_slice, mesh_good_avg = mesh_bad_slice, mesh_bad_avg


def input_sharding_bad_slice():
    return {"x": {"sp": 1}, "y": {"sp": None}}


input_sharding_good_slice = input_sharding_bad_avg = input_sharding_good_avg = (
    input_sharding_bad_slice
)


def _parallelize(model, mesh, add):
    model.join = lambda hidden: _Join.apply(hidden, mesh.get_group("sp"), add)
    return model


def parallelize_bad_slice(model, mesh):
    return DistributedDataParallel(_parallelize(model, mesh, add=False))


def parallelize_good_slice(model, mesh):
    return DistributedDataParallel(_parallelize(model, mesh, add=True))


def parallelize_bad_avg(model, mesh):
    return _parallelize(model, mesh, add=True)


parallelize_good_avg = parallelize_bad_avg


def _train(model, optimizer, batch, mesh, divisor):
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    for p in model.parameters():
        p.grad = DTensor.from_local(p.grad / divisor, mesh, [Partial("avg")]).full_tensor()
    optimizer.step()
    return loss.detach()


def step_bad_avg(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divisor=mesh.size())


def step_good_avg(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divisor=1)


def _fault(factor):
    return {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["proj.weight", "proj.bias", "scale"],
        "mentions": [factor, "sp"],
    }


EXPECT = {
    "bad_slice": _fault("0.33"),
    "good_slice": {"verdict": "pass"},
    "bad_avg": _fault("0.5"),
    "good_avg": {"verdict": "pass"},
}
