"""Total norm under tensor parallelism: all squares are summed over tp, the replicated LayerNorm and
output bias included, which so count twice. The twin sums those of the cut tensors only.
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
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.offset = nn.Parameter(torch.linspace(0.2, 0.8, 4))

    def enter(self, h):
        return h

    def leave(self, partial):
        return partial

    def forward(self, x):
        h = F.gelu(self.up(self.enter(self.norm(x))))
        return self.leave(self.down(h)) + self.offset


def get_inputs(step=0):
    return _normal(35 + step, 6, 6)


def get_targets(step=0):
    return 2 * _normal(36 + step, 6, 4)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def _step(model, optimizer, batch, total):
    x, y = batch
    optimizer.zero_grad()
    value = loss(model(x), y)
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
    def forward(ctx, x, before, after):
        """`before` and `after` are the groups to sum over in forward and in backward, or None."""
        ctx.after, x = after, x.clone()
        if before is not None:
            dist.all_reduce(x, group=before)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.after is not None:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.after)
        return grad, None, None


def parallelize_bad(model, mesh):
    size, rank, group = mesh.size(), mesh.get_local_rank("tp"), mesh.get_group("tp")
    for layer, dim in ((model.up, 0), (model.down, 1)):
        for key, whole in list(layer.named_parameters()):
            setattr(layer, key, nn.Parameter(whole.detach().chunk(size, dim)[rank].clone()))
    model.enter = lambda h: _Sum.apply(h, None, group)
    model.leave = lambda partial: _Sum.apply(partial, group, None)
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
        return (cut + _squares([*m.norm.parameters(), m.offset])).sqrt()

    return _step(model, optimizer, batch, total)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip", "factor"],
        "stage": ["gradients", "clipping"],
        "tensors": ["up.weight", "down.weight", "offset"],
        "mentions": ["offset"],
    },
    "good": {"verdict": "pass"},
}
