"""Ring attention, causal: a rank folds in the blocks of the ranks before it. `bad` averages the
blocks' outputs with equal weight instead of by their share of the softmax, so rank 0, which has one
block, is right and all others wrong.
Class: https://github.com/NVIDIA/Megatron-LM/issues/1464 (context-parallel attention that differs
from one device)
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
        self.group, self.rescale = None, True

    def forward(self, q, k, v):
        if self.group is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = _Blocks.apply(k, self.group), _Blocks.apply(v, self.group)
        outs, weights = [], []
        for block in range(self.group.rank() + 1):
            scores = q @ keys[block].transpose(1, 2) / q.shape[-1] ** 0.5
            if block == self.group.rank():
                later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            outs.append(scores.softmax(-1) @ values[block])
            weights.append(scores.logsumexp(-1))
        weights = torch.stack(weights)
        weights = weights if self.rescale else torch.zeros_like(weights)
        return (torch.stack(outs) * weights.softmax(0)[..., None]).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(5, 4)
        self.key = nn.Linear(5, 4, bias=False)
        self.value = nn.Linear(5, 4)
        self.causal = Causal()
        self.out = nn.Linear(4, 3)
        nn.init.normal_(self.query.weight)
        nn.init.normal_(self.key.weight)

    def forward(self, x):
        return self.out(self.causal(self.query(x), self.key(x), self.value(x)))


def get_inputs(step=0):
    return _noise(4600 + step, 2, 9, 5)


def get_targets(step=0):
    return _noise(4630 + step, 2, 9, 3)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


class _Blocks(torch.autograd.Function):
    """Every rank's block, stacked; the sum of own block's gradient over ranks in backward."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


def mesh_bad():
    return {"cp": 3}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"cp": 1}, "targets": {"cp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    model.causal.group, model.causal.rescale = mesh.get_group("cp"), False
    return model


def parallelize_good(model, mesh):
    model.causal.group = mesh.get_group("cp")
    return model


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
        "kind": ["mean_of_means", "position", "unexplained"],
        "stage": "module_outputs",
        "tensors": ["causal"],
        "mentions": ["causal", "rank 1"],
    },
    "good": {"verdict": "pass"},
}
