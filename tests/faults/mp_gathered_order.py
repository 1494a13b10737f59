"""Column shards collected into one buffer. `all_gather_into_tensor` stacks ranks along dim 0; `bad`
views the buffer as (rows, columns) without moving the rank dim, so features land in other samples'
rows. The shapes fit, nothing raises.
Class: https://github.com/vllm-project/vllm/pull/36242 (gather that returns a rearranged tensor)
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
        self.encode = nn.Linear(4, 8)
        self.decode = nn.Linear(8, 4)

    def forward(self, x):
        return self.decode(F.softplus(self.encode(x)))


def get_inputs(step=0):
    return _noise(2400 + step, 6, 4)


def get_targets(step=0):
    return _noise(2430 + step, 6, 4)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group, move):
        ctx.group, ctx.move = group, move
        ranks = group.size()
        buffer = part.new_empty(ranks * part.shape[0], part.shape[1])
        dist.all_gather_into_tensor(buffer, part.contiguous(), group=group)
        if move:
            buffer = buffer.unflatten(0, (ranks, -1)).transpose(0, 1)
        return buffer.reshape(part.shape[0], -1)

    @staticmethod
    def backward(ctx, grad):
        ranks, rank = ctx.group.size(), ctx.group.rank()
        if ctx.move:
            return grad.chunk(ranks, 1)[rank], None, None
        return grad.reshape(ranks * grad.shape[0], -1).chunk(ranks)[rank], None, None


def mesh_bad():
    return {"tp": 4}


def layout_bad():
    return {"encode.*": [Shard(0)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, move):
    group, encode = mesh.get_group("tp"), model.encode
    for name, p in list(encode.named_parameters()):
        own = p.detach().chunk(group.size())[group.rank()]
        setattr(encode, name, nn.Parameter(own.clone()))

    def forward(x):
        return _Columns.apply(F.linear(x, encode.weight, encode.bias), group, move)

    encode.forward = forward
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, move=False)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, move=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["encode"],
        "mentions": ["encode", "tp"],
    },
    "good": {"verdict": "pass"},
}
