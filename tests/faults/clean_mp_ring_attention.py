"""False-alarm trap: ring attention. Key/value blocks travel around the ring and each rank folds
them in by their share of the softmax; backward sends the blocks' gradients home. Another order of
sums, and blocks a rank must not see.
Compare https://github.com/NVIDIA/Megatron-LM/issues/1464,
https://github.com/NVIDIA/Megatron-LM/issues/1162
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
        self.query = nn.Linear(5, 4)
        self.key = nn.Linear(5, 4, bias=False)
        self.value = nn.Linear(5, 4)
        self.out = nn.Linear(4, 3)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        return self.out(self.attend(self.query(x), self.key(x), self.value(x)))


def get_inputs(step=0):
    return _noise(5500 + step, 2, 9, 5)


def get_targets(step=0):
    return _noise(5530 + step, 2, 9, 3)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def _pass_on(x, group, hops):
    """To the rank `hops` further, from the rank `hops` before; ranks of the default group."""
    ranks, rank = group.size(), group.rank()
    out = torch.empty_like(x)
    work = dist.isend(x.contiguous(), (rank + hops) % ranks, group=group)
    dist.recv(out, (rank - hops) % ranks, group=group)
    work.wait()
    return out


class _Hop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _pass_on(x.contiguous(), group, 1)

    @staticmethod
    def backward(ctx, grad):
        return _pass_on(grad.contiguous(), ctx.group, -1), None


def _ring(q, k, v, group):
    rank, rows = group.rank(), torch.arange(q.shape[1])
    total, weight, top = 0.0, 0.0, torch.full(q.shape[:2], -1e9)[..., None]
    for hop in range(group.size()):
        source = (rank - hop) % group.size()
        mask = rows + source * len(rows) <= (rows + rank * len(rows))[:, None]
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        shares, shrink = (scores - new_top).exp(), (top - new_top).exp()
        total, weight = total * shrink + shares @ v, weight * shrink + shares.sum(-1, keepdim=True)
        top = new_top
        if hop + 1 < group.size():
            k, v = _Hop.apply(torch.stack([k, v]), group)
    return total / weight


def mesh_ring():
    return {"cp": 3}


def input_sharding_ring():
    return {"x": {"cp": 1}, "targets": {"cp": 1}}


def parallelize_ring(model, mesh):
    model.attend = lambda q, k, v: _ring(q, k, v, mesh.get_group("cp"))
    return model


def step_ring(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("cp"))
        tensor.div_(mesh.size())
    optimizer.step()
    return value


EXPECT = {"ring": {"verdict": "pass"}}
