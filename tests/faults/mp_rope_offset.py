"""Rotary embedding on a sequence shard counts positions from 0 on every cp rank; keys are gathered
after the rotation. The twin starts at the shard's first position.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/2377,
https://github.com/NVIDIA/Megatron-LM/issues/453
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.start = 0
        self.register_buffer("speed", 3.0 ** -torch.arange(0, width, 2).div(width))

    def forward(self, x):
        places = torch.arange(x.shape[1]) + self.start
        angle = places[:, None] * self.speed
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6)
        self.rotary = Rotary(6)
        self.head = nn.Linear(6, 9)

    def whole(self, tokens):
        return tokens

    def forward(self, ids):
        x = self.embed(ids)
        keys = self.whole(self.rotary(self.key(x)))
        scores = self.rotary(self.query(x)) @ keys.transpose(1, 2) / 6**0.5
        return self.head(scores.softmax(-1) @ self.whole(x))


def get_inputs(step=0):
    return torch.randint(0, 9, (3, 8), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (3, 8), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.7)


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
    return {"cp": 4}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"ids": {"cp": 1}, "targets": {"cp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    model.whole = lambda tokens: _Whole.apply(tokens, mesh.get_group("cp"))
    return model


def parallelize_good(model, mesh):
    model.rotary.start = 8 // mesh.size() * mesh.get_local_rank("cp")
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
        "tensors": ["rotary"],
        "mentions": ["rotary", "rank 1"],
    },
    "good": {"verdict": "pass"},
}
