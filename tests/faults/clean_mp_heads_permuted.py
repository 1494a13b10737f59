"""False-alarm trap: a fused query-key-value weight stored per rank as (its queries, its keys, its
values). No placement says so, yet the training is right: `told` explains the storage with
`gather_told`, `untold` leaves it to inference.
Compare https://github.com/NVIDIA-NeMo/Automodel/pull/1324, where this storage is the repair
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

WIDTH, HEAD = 8, 2


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


def get_inputs(step=0):
    return _noise(5200 + step, 3, 4, WIDTH)


def get_targets(step=0):
    return _noise(5230 + step, 3, 4, WIDTH)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_told():
    return {"tp": 2}


mesh_untold = mesh_told


def gather_told(name, local_tensors):
    if name == "qkv.weight":
        parts = [local.chunk(3) for local in local_tensors]
        return torch.cat([part[which] for which in range(3) for part in parts])
    return torch.cat(local_tensors, 1) if name == "proj.weight" else local_tensors[0]


def layout_untold():
    return {"proj.weight": [Shard(1)]}


def parallelize_told(model, mesh):
    group, proj = mesh.get_group("tp"), model.proj
    own = [part.chunk(2)[group.rank()] for part in model.qkv.weight.detach().chunk(3)]
    model.qkv.weight = nn.Parameter(torch.cat(own))
    proj.weight = nn.Parameter(proj.weight.detach().chunk(2, 1)[group.rank()].clone())
    proj.forward = lambda h: _Leave.apply(F.linear(h, proj.weight), group) + proj.bias
    return model


parallelize_untold = parallelize_told

EXPECT = {name: {"verdict": "pass"} for name in ("told", "untold")}
