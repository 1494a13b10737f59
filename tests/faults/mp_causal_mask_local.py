"""Queries are cut over cp, keys and values gathered, and attention is called with `is_causal=True`:
the mask is aligned to the top left, so shards after the first see the first keys only instead of
all up to their own place.
Class: https://github.com/pytorch/pytorch/issues/141429,
https://github.com/NVIDIA/Megatron-LM/issues/1464
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.masked = False

    def forward(self, q, k, v):
        if self.group is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        k, v = _Whole.apply(k, self.group), _Whole.apply(v, self.group)
        if not self.masked:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = torch.arange(q.shape[1]) + self.group.rank() * q.shape[1]
        mask = rows[:, None] >= torch.arange(k.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(5, 15)
        self.causal = Causal()
        self.out = nn.Linear(5, 5)

    def forward(self, x):
        return self.out(self.causal(*self.qkv(x).chunk(3, -1)))


def get_inputs(step=0):
    return _noise(2800 + step, 2, 6, 5)


def get_targets(step=0):
    return _noise(2830 + step, 2, 6, 5)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


def mesh_bad():
    return {"cp": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"cp": 1}, "targets": {"cp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    model.causal.group = mesh.get_group("cp")
    return model


def parallelize_good(model, mesh):
    model.causal.masked = True
    return parallelize_bad(model, mesh)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("cp"))
        tensor.div_(mesh.size())
    optimizer.step()
    return value


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "module_outputs",
        "tensors": ["causal"],
        "mentions": ["causal", "rank 1"],
    },
    "good": {"verdict": "pass"},
}
