"""Experts spread over ep, tokens on every rank; each rank adds its experts' output into zeros and
`torch.distributed.nn.functional.all_reduce` joins them. Its backward sums the equal gradients of
all ranks again, so experts get ep times theirs. The twin's sum passes the gradient through.
Class: https://github.com/deepspeedai/DeepSpeed/pull/6546,
https://github.com/NVIDIA/Megatron-LM/pull/7160
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def join(self, x):
        return x

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        out = x.new_zeros(x.shape[0], 4)
        for number, expert in enumerate(self.experts):
            if expert is not None:
                out = out + gates[:, number : number + 1].detach() * F.elu(expert(x))
        return self.head(self.join(out) * gates.max(-1, keepdim=True).values)


def get_inputs(step=0):
    return _noise(4300 + step, 9, 5)


def get_targets(step=0):
    return torch.randint(0, 2, (9,), generator=torch.Generator().manual_seed(4330 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, eps=1e-2)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad():
    return {"ep": 3}


mesh_good = mesh_bad


def _parallelize(model, mesh, join):
    for number in range(3):
        if number != mesh.get_local_rank("ep"):
            model.experts[number] = None
    model.join = join
    return model


def parallelize_bad(model, mesh):
    group = mesh.get_group("ep")
    return _parallelize(model, mesh, lambda x: all_reduce(x, group=group))


def parallelize_good(model, mesh):
    group = mesh.get_group("ep")
    return _parallelize(model, mesh, lambda x: _Join.apply(x, group))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor", "double_reduction"],
        "stage": "gradients",
        "tensors": [f"experts.{n}.{part}" for n in range(3) for part in ("weight", "bias")],
        "mentions": ["experts.0.weight", "3", "ep"],
    },
    "good": {"verdict": "pass"},
}
