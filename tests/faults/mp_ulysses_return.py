"""Ulysses: an all-to-all trades sequence shards for heads, attention runs on whole sequences, a
second all-to-all trades back. `bad` joins what it gets back along the channels as (channel, rank)
instead of (rank, channel): heads are shuffled.
Class: https://github.com/vllm-project/vllm/pull/36242 (collected blocks in the wrong order)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

HEADS, HEAD = 4, 3


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _all_to_all(x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class _Trade(torch.autograd.Function):
    """Rank r's block s of dim 0 becomes rank s's block r; its own transpose."""

    @staticmethod
    def forward(ctx, blocks, group):
        ctx.group = group
        return _all_to_all(blocks.contiguous(), group)

    @staticmethod
    def backward(ctx, grad):
        return _all_to_all(grad.contiguous(), ctx.group), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD, 3 * HEADS * HEAD)
        self.mixed = nn.Identity()
        self.proj = nn.Linear(HEADS * HEAD, HEADS * HEAD)

    def whole(self, x):
        return x

    def back(self, x):
        return x

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        q, k, v = (self.whole(t).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(self.mixed(self.back(out.transpose(1, 2)).flatten(2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x, y):
        return F.huber_loss(x + self.attn(x), y, delta=0.7)


def get_inputs(step=0):
    return {"x": _noise(4700 + step, 2, 6, 12), "y": _noise(4730 + step, 2, 6, 12)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.8, momentum=0.4)


def mesh_bad():
    return {"sp": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"sp": 1}, "y": {"sp": 1}}


input_sharding_good = input_sharding_bad


def _parallelize(model, mesh, join):
    group = mesh.get_group("sp")

    def whole(x):  # batch, own tokens, heads, channels -> batch, tokens, own heads, channels
        blocks = torch.stack(x.chunk(group.size(), 2))
        return torch.cat(list(_Trade.apply(blocks, group)), 1)

    def back(x):
        blocks = _Trade.apply(torch.stack(x.chunk(group.size(), 1)), group)
        return join(blocks)

    model.attn.whole, model.attn.back = whole, back
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, lambda blocks: blocks.movedim(0, 3).flatten(2, 3))


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, lambda blocks: torch.cat(list(blocks), 2))


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
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
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["attn.mixed"],
        "mentions": ["attn.mixed", "sp"],
    },
    "good": {"verdict": "pass"},
}
