"""Causal convolution over a sequence cut by rank: each shard pads its left edge with zeros instead
of the neighbour's last values, so only the rows next to a cut are wrong. The twin fetches that
halo.
Class: https://github.com/NVIDIA/Megatron-LM/issues/453 (a layer that does not know where its shard
begins)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

REACH = 2


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class CausalConv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(width, width, REACH + 1))
        self.bias = nn.Parameter(torch.randn(width))

    def before(self, x):
        return x.new_zeros(x.shape[0], x.shape[1], REACH)

    def forward(self, x):
        return F.conv1d(torch.cat([self.before(x), x], -1), self.weight, self.bias)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(3, 4, 1)
        self.conv = CausalConv(4)
        self.out = nn.Conv1d(4, 2, 1)

    def forward(self, signal):
        return self.out(torch.tanh(self.conv(self.lift(signal))))


def get_inputs(step=0):
    return _noise(4200 + step, 2, 3, 12)


def get_targets(step=0):
    return _noise(4230 + step, 2, 2, 12)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.Adamax(params, lr=0.02, eps=1e-2)


class _Halo(torch.autograd.Function):
    """The last values of the rank before; the first rank gets zeros."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[-1]
        edges = [torch.empty_like(x[..., -REACH:].contiguous()) for _ in range(group.size())]
        dist.all_gather(edges, x[..., -REACH:].contiguous(), group=group)
        rank = group.rank()
        return edges[rank - 1] if rank else torch.zeros_like(edges[0])

    @staticmethod
    def backward(ctx, grad):
        edges = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(edges, grad.contiguous(), group=ctx.group)
        after = ctx.group.rank() + 1
        own = edges[after] if after < len(edges) else torch.zeros_like(grad)
        return F.pad(own, (ctx.length - REACH, 0)), None


def mesh_bad():
    return {"sp": 3}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"signal": {"sp": 2}, "targets": {"sp": 2}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    return model


def parallelize_good(model, mesh):
    model.conv.before = lambda x: _Halo.apply(x, mesh.get_group("sp"))
    return model


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("sp"))
        tensor.div_(mesh.size())
    optimizer.step()
    return value


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "module_outputs",
        "tensors": ["conv"],
        "mentions": ["conv", "sp"],
    },
    "good": {"verdict": "pass"},
}
