"""Collectives that run and do not sum for all: `bad_root` reduces to rank 0 and sends nothing back,
`bad_max` takes the largest of the ranks' gradients. The twin sums everywhere.
Class: https://github.com/NVIDIA/Megatron-LM/issues/1446 (gradients that differ by rank)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        return self.out(F.silu(self.norm(self.conv(x))).mean(-1))


def get_inputs(step=0):
    return torch.randn(8, 3, 7, generator=torch.Generator().manual_seed(9200 + step))


def get_targets(step=0):
    return torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(9230 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mesh_good():
    return {"dp": 4}


def _hooked(model, mesh, reduce):
    def average(parameter):
        gradient = parameter.grad.clone()
        reduce(gradient)
        parameter.grad = gradient / mesh.size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def parallelize_good(model, mesh):
    _hooked(model, mesh, dist.all_reduce)


def parallelize_bad_max(model, mesh):
    _hooked(model, mesh, lambda g: dist.all_reduce(g, dist.ReduceOp.MAX))


def parallelize_bad_root(model, mesh):
    def reduce(gradient):
        total = gradient.clone()
        dist.reduce(total, 0)
        if dist.get_rank() == 0:
            gradient.copy_(total)

    _hooked(model, mesh, reduce)


mesh_bad_root = mesh_bad_max = mesh_good

_FAULT = {
    "verdict": "mismatch",
    "kind": ["missing_reduction"],
    "stage": "gradients",
    "tensors": ["conv.weight", "norm.bias", "out.bias"],
}

EXPECT = {
    "bad_root": _FAULT | {"mentions": ["rank 0 only", "rank 3"]},
    "bad_max": _FAULT | {"mentions": ["MAX"]},
    "good": {"verdict": "pass"},
}
