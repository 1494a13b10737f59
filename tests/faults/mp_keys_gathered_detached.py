"""Context parallel attention gathers keys and values with a collective that autograd does not
follow, and puts its own part back: what other ranks' queries give them is lost.
Class: torch.distributed.all_gather where the functional one is due.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)
        self.whole = lambda x: x

    def forward(self, ids):
        x = self.embed(ids)
        k, v = (self.whole(self.key(x)), self.whole(self.value(x)))
        return self.head(x + (self.query(x) @ k.transpose(1, 2) / 6**0.5).softmax(-1) @ v)


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.7)


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
        return (grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None)


def _gather(x, g, own):
    parts = [torch.empty_like(x) for _ in range(g.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=g)
    if own:
        parts[g.rank()] = x
    return torch.cat(parts, 1)


def mesh_good():
    return {"dp": 2, "cp": 2}


def mesh_bad():
    return {"cp": 2}


def mesh_bad_two_axes():
    return {"dp": 2, "cp": 2}


def input_sharding_good():
    return {"ids": {"dp": 0, "cp": 1}, "targets": {"dp": 0, "cp": 1}}


input_sharding_bad_two_axes = input_sharding_good


def input_sharding_bad():
    return {"ids": {"cp": 1}, "targets": {"cp": 1}}


def parallelize_good(m, mesh):
    m.whole = lambda x: _Whole.apply(x, mesh.get_group("cp"))
    return m


def parallelize_bad(m, mesh):
    m.whole = lambda x: _gather(x, mesh.get_group("cp"), True)
    return m


parallelize_bad_two_axes = parallelize_bad


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    v = v.detach().clone()
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for t in [v, *(p.grad for p in model.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    optimizer.step()
    return v


step_bad = step_good
step_bad_two_axes = step_good

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["value.weight", "value.bias"],
        "mentions": ["value", "cp"],
    },
    "bad_two_axes": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["value.weight"],
        "mentions": ["value", "cp"],
    },
    "good": {"verdict": "pass"},
}
