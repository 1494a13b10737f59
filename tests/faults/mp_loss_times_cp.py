"""Context parallelism with gathered keys and values. The local token mean is right per rank, but
gradients are summed over cp instead of averaged ("each rank's loss is already a mean"): all of them
are cp times too large.
Class: https://github.com/deepspeedai/DeepSpeed/issues/5248
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_row = 0
        self.query = nn.Linear(5, 6)
        self.key = nn.Linear(5, 6, bias=False)
        self.value = nn.Linear(5, 6)
        self.out = nn.Linear(6, 2)

    def collect(self, tokens):
        return tokens

    def forward(self, x, y):
        q, k, v = self.query(x), self.collect(self.key(x)), self.collect(self.value(x))
        rows = torch.arange(q.shape[1])[:, None] + self.first_row
        mask = torch.arange(k.shape[1])[None] <= rows
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.mse_loss(self.out(mixed), y)


def get_inputs(step=0):
    return {"x": _noise(1300 + step, 2, 9, 5), "y": _noise(1330 + step, 2, 9, 2)}


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, eps=1e-2)


class _Collect(torch.autograd.Function):
    """All tokens in forward; the sum over ranks of the gradient of own tokens in backward."""

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
    return {"cp": 3}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"cp": 1}, "y": {"cp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    group = mesh.get_group("cp")
    model.first_row = 3 * group.rank()
    model.collect = lambda tokens: _Collect.apply(tokens, group)
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, divisor):
    group = mesh.get_group("cp")
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad.div_(divisor)
    optimizer.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss / group.size()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divisor=1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divisor=mesh.size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": [
            "query.weight",
            "query.bias",
            "key.weight",
            "value.weight",
            "value.bias",
            "out.weight",
            "out.bias",
        ],
        "mentions": ["3", "cp"],
    },
    "good": {"verdict": "pass"},
}
