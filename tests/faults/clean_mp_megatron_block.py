"""False-alarm trap: a transformer block in hand-written tensor parallelism, two heads a rank,
replicated norms, dropout with the whole mask. Sums are in another order than on one device, nothing
else.
Compare https://github.com/pytorch/pytorch/issues/144359
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

HEAD = 2


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.value, self.proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rise, self.fall = nn.Linear(8, 16), nn.Linear(16, 8)

    def enter(self, x):
        return x

    def leave(self, layer, h):
        return layer(h)

    def forward(self, x):
        h = self.enter(self.norm1(x))
        layers = (self.query, self.key, self.value)
        q, k, v = (m(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in layers)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.proj, mixed.transpose(1, 2).flatten(2))
        h = self.leave(self.fall, F.gelu(self.rise(self.enter(self.norm2(x)))))
        return x + F.dropout(h, 0.2, self.training)


def get_inputs(step=0):
    return _noise(5400 + step, 3, 5, 8)


def get_targets(step=0):
    return _noise(5430 + step, 3, 5, 8)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1)


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
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_plain():
    return {"tp": 4}


def layout_plain():
    columns = {f"{name}.*": [Shard(0)] for name in ("query", "key", "value", "rise")}
    return columns | {"proj.weight": [Shard(1)], "fall.weight": [Shard(1)]}


def parallelize_plain(model, mesh):
    group = mesh.get_group("tp")
    for layer in (model.query, model.key, model.value, model.rise):
        for name, p in list(layer.named_parameters()):
            own = p.detach().chunk(group.size())[group.rank()]
            setattr(layer, name, nn.Parameter(own.clone()))
    for layer in (model.proj, model.fall):
        own = layer.weight.detach().chunk(group.size(), 1)[group.rank()]
        layer.weight = nn.Parameter(own.clone())

    def leave(layer, h):
        return _Leave.apply(F.linear(h, layer.weight), group) + layer.bias

    model.enter, model.leave = lambda x: _Enter.apply(x, group), leave
    return model


EXPECT = {"plain": {"verdict": "pass"}}
