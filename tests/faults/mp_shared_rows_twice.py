"""Fused multi-query projection: each rank holds its own query rows and a copy of the shared
key/value rows. Autograd already sums the shared activation's gradient, and the training loop sums
the shared rows again: only they are doubled.
Class: https://github.com/NVIDIA/Megatron-LM/pull/6839
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEAD = 8, 2


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(WIDTH, WIDTH + 2 * HEAD)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 3)

    def shared(self, x):
        return x

    def forward(self, x):
        fused = self.fused(x)
        q, kv = fused[..., : -2 * HEAD], self.shared(fused[..., -2 * HEAD :])
        q = q.unflatten(-1, (-1, HEAD)).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand_as(q) for t in kv.chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(torch.tanh(self.proj(mixed)))


def get_inputs(step=0):
    return _noise(4100 + step, 3, 5, WIDTH)


def get_targets(step=0):
    return torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(4130 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


class _Shared(torch.autograd.Function):
    """Identity in forward, sum over the ranks in backward."""

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


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    group, proj = mesh.get_group("tp"), model.proj
    for name, p in list(model.fused.named_parameters()):
        own = p.detach()[:WIDTH].chunk(group.size())[group.rank()]
        setattr(model.fused, name, nn.Parameter(torch.cat([own, p.detach()[WIDTH:]])))
    proj.weight = nn.Parameter(proj.weight.detach().chunk(group.size(), 1)[group.rank()].clone())
    proj.forward = lambda h: _Leave.apply(F.linear(h, proj.weight), group)
    model.shared = lambda x: _Shared.apply(x, group)
    return model


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.fused.parameters():
        dist.all_reduce(p.grad[-2 * HEAD :], group=mesh.get_group("tp"))
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach()


def gather_bad(name, local_tensors):
    if name.startswith("fused"):
        queries = [local[: -2 * HEAD] for local in local_tensors]
        return torch.cat([*queries, local_tensors[0][-2 * HEAD :]])
    return torch.cat(local_tensors, 1) if name == "proj.weight" else local_tensors[0]


gather_good = gather_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction", "factor"],
        "stage": "gradients",
        "tensors": ["fused.weight", "fused.bias"],
        "mentions": ["fused.weight", "2"],
    },
    "good": {"verdict": "pass"},
}
