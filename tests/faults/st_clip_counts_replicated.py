"""Total norm under tensor parallelism: all squares are summed over tp, those of the replicated norm
and head included, which so count twice. The twin sums those of the cut tensors only.
Class: https://github.com/ROCm/TransformerEngine/pull/715 (replicated weights taken as sharded)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

MAX_NORM = 0.2


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def collect(self, partial):
        return partial

    def forward(self, x, y):
        h = self.collect(self.down(F.gelu(self.up(x))))
        return F.mse_loss(self.head(self.norm(h)), y)


def get_inputs(step=0):
    return {"x": _normal(35 + step, 6, 6), "y": 2 * _normal(36 + step, 6, 4)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def _step(model, optimizer, batch, total):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    scale = (MAX_NORM / (total(model) + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(scale)
    optimizer.step()
    return value.detach()


def _squares(params):
    return torch.stack([p.grad.square().sum() for p in params]).sum()


def step(model, optimizer, batch):
    return _step(model, optimizer, batch, lambda m: _squares(m.parameters()).sqrt())


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def layout_bad():
    return {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]}


layout_good = layout_bad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def parallelize_bad(model, mesh):
    size, rank, group = mesh.size(), mesh.get_local_rank("tp"), mesh.get_group("tp")
    for layer, dim in ((model.up, 0), (model.down, 1)):
        for key, whole in list(layer.named_parameters()):
            setattr(layer, key, nn.Parameter(whole.detach().chunk(size, dim)[rank].clone()))
    model.collect = lambda partial: _Sum.apply(partial, group)
    return model


parallelize_good = parallelize_bad


def _over_tp(square, mesh):
    dist.all_reduce(square, group=mesh.get_group("tp"))
    return square


def step_bad(model, optimizer, batch, mesh):
    def total(m):
        return _over_tp(_squares(m.parameters()), mesh).sqrt()

    return _step(model, optimizer, batch, total)


def step_good(model, optimizer, batch, mesh):
    def total(m):
        cut = _over_tp(_squares([*m.up.parameters(), *m.down.parameters()]), mesh)
        return (cut + _squares([*m.norm.parameters(), *m.head.parameters()])).sqrt()

    return _step(model, optimizer, batch, total)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip", "factor"],
        "stage": ["gradients", "clipping"],
        "tensors": ["up.weight", "down.weight", "head.weight"],
        "mentions": ["head.weight"],
    },
    "good": {"verdict": "pass"},
}
