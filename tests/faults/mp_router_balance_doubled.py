"""Balance loss of a router under tensor parallelism: every rank counts all tokens, yet the counts
are all-reduced in place over tp, so the auxiliary term is tp times too large. Cross entropy is
right; only the router learns wrongly.
Class: https://github.com/NVIDIA/Megatron-LM/pull/3768
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
        self.router = nn.Linear(6, 3)
        self.rise = nn.Parameter(0.4 * torch.randn(3, 6, 8))
        self.fall = nn.Parameter(0.4 * torch.randn(3, 8, 2))

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def counted(self, counts):
        return counts

    def forward(self, x, y):
        probs = self.router(x).softmax(-1)
        weight, choice = probs.max(-1)
        hidden = F.relu(torch.einsum("ni,nij->nj", self.enter(x), self.rise[choice]))
        out = self.leave(torch.einsum("nj,njk->nk", hidden, self.fall[choice])) * weight[:, None]
        counts = self.counted(F.one_hot(choice, 3).sum(0).float())
        balance = 3 * (counts / x.shape[0] * probs.mean(0)).sum()
        return F.mse_loss(out, y) + 0.1 * balance


def get_inputs(step=0):
    return {"x": _noise(1700 + step, 12, 6), "y": _noise(1730 + step, 12, 2)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def mesh_bad():
    return {"tp": 2}


def layout_bad():
    return {"rise": [Shard(2)], "fall": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def parallelize_good(model, mesh):
    ranks, rank = mesh.size(), mesh.get_local_rank("tp")
    model.rise = nn.Parameter(model.rise.detach().chunk(ranks, 2)[rank].clone())
    model.fall = nn.Parameter(model.fall.detach().chunk(ranks, 1)[rank].clone())
    model.enter, model.leave = _Enter.apply, _Leave.apply
    return model


def parallelize_bad(model, mesh):
    def counted(counts):
        dist.all_reduce(counts, group=mesh.get_group("tp"))
        return counts

    model.counted = counted
    return parallelize_good(model, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive", "factor", "double_reduction"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss", "router"],
    },
    "good": {"verdict": "pass"},
}
