"""Fused gate-and-up weight cut contiguously over tp, by hand, and then halved on each rank: some
ranks multiply gate with gate. The twin takes each rank's rows from both halves, which no placement
can say: hence `gather_good`.
Class: https://github.com/pytorch/torchtitan/pull/4535,
https://github.com/NVIDIA-NeMo/Automodel/pull/1324
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(5, 12)
        self.product = nn.Identity()
        self.down = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        gate, up = self.fused(x).chunk(2, -1)
        return self.down(self.product(F.gelu(gate) * up))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn = Gated()
        self.out = nn.Linear(5, 2)

    def forward(self, x, y):
        return F.mse_loss(self.out(torch.tanh(self.ffn(x))), y)


def get_inputs(step=0):
    return {"x": _noise(2200 + step, 6, 5), "y": _noise(2230 + step, 6, 2)}


def get_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.05, eps=1e-4)


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


mesh_good = mesh_bad


def _parallelize(model, mesh, rows):
    group, fused, down = mesh.get_group("tp"), model.ffn.fused, model.ffn.down
    fused.weight = nn.Parameter(rows(fused.weight.detach()).clone())
    fused.bias = nn.Parameter(rows(fused.bias.detach()).clone())
    columns = down.weight.detach().chunk(group.size(), 1)[group.rank()]
    down.weight = nn.Parameter(columns.clone())
    down.forward = lambda h: _Leave.apply(F.linear(h, down.weight), group)
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, lambda t: t.chunk(3)[mesh.get_local_rank("tp")])


def parallelize_good(model, mesh):
    rank = mesh.get_local_rank("tp")
    return _parallelize(model, mesh, lambda t: torch.cat([h.chunk(3)[rank] for h in t.chunk(2)]))


def gather_bad(name, local_tensors):
    if name.startswith("ffn.fused"):
        return torch.cat(local_tensors)
    return torch.cat(local_tensors, 1) if name == "ffn.down.weight" else local_tensors[0]


def gather_good(name, local_tensors):
    if name.startswith("ffn.fused"):
        halves = [local.chunk(2) for local in local_tensors]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return gather_bad(name, local_tensors)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["ffn.product"],
        "mentions": ["ffn.product", "tp", "block order 0, 2, 4, 1, 3, 5"],
    },
    "good": {"verdict": "pass"},
}
