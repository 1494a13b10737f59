"""Row-parallel attention output: each rank adds the bias to its partial sum, the reduction then
adds it once per rank. The twin adds it after the reduction.
Class: https://github.com/GeeeekExplorer/nano-vllm/issues/99 (the question whether a bias is summed
tp times)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6, bias=False)
        self.value = nn.Linear(6, 6)
        self.proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.proj.bias, 0.8, 0.3)

    def enter(self, x):
        return x

    def forward(self, x):
        h = self.enter(x)
        heads = (m(h).unflatten(-1, (-1, 2)).transpose(1, 2) for m in self.qkv())
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.norm(x + self.proj(mixed))

    def qkv(self):
        return self.query, self.key, self.value


def get_inputs(step=0):
    return _noise(1900 + step, 3, 5, 6)


def get_targets(step=0):
    return _noise(1930 + step, 3, 5, 6)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


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
    return {
        "query.*": [Shard(0)],
        "key.*": [Shard(0)],
        "value.*": [Shard(0)],
        "proj.weight": [Shard(1)],
    }


mesh_good, layout_good = mesh_bad, layout_bad


def _split(model, mesh):
    ranks, rank = mesh.size(), mesh.get_local_rank("tp")
    for layer in model.qkv():
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(p.detach().chunk(ranks, 0)[rank].clone()))
    model.proj.weight = nn.Parameter(model.proj.weight.detach().chunk(ranks, 1)[rank].clone())
    return model.proj, mesh.get_group("tp")


def parallelize_bad(model, mesh):
    proj, group = _split(model, mesh)
    proj.forward = lambda h: _Leave.apply(F.linear(h, proj.weight, proj.bias), group)
    return model


def parallelize_good(model, mesh):
    proj, group = _split(model, mesh)
    proj.forward = lambda h: _Leave.apply(F.linear(h, proj.weight), group) + proj.bias
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive"],
        "stage": "module_outputs",
        "tensors": ["proj"],
        "mentions": ["proj", "bias", "2"],
    },
    "good": {"verdict": "pass"},
}
