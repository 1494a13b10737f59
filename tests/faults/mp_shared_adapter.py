"""Low-rank adapter on a column-parallel layer: the down projection is replicated, the up projection
is cut by output columns, so each rank holds a part of the down projection's gradient. Only the twin
adds the parts.
Class: https://github.com/ISEEKYAN/Megatron-LM/pull/131
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import Shard


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class AdaptedLinear(nn.Module):
    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(0.5 * torch.randn(rank, inputs))
        self.lora_b = nn.Parameter(0.5 * torch.randn(outputs, rank))
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = AdaptedLinear(5, 9)
        self.back = nn.Linear(9, 4, bias=False)
        self.shift = nn.Parameter(torch.randn(4))

    def leave(self, partial):
        return partial

    def forward(self, x, y):
        out = self.leave(self.back(torch.tanh(self.wide(x)))) + self.shift
        return nn.functional.smooth_l1_loss(out, y, beta=0.3)


def get_inputs(step=0):
    return {"x": _noise(400 + step, 6, 5), "y": _noise(430 + step, 6, 4)}


def get_optimizer(params):
    return torch.optim.RMSprop([p for p in params if p.requires_grad], lr=0.02, eps=1e-3)


class _SumForward(torch.autograd.Function):
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


def layout_bad():
    return {"wide.base.*": [Shard(0)], "wide.lora_b": [Shard(0)], "back.weight": [Shard(1)]}


mesh_good, layout_good = mesh_bad, layout_bad


def parallelize_bad(model, mesh):
    group = mesh.get_group("tp")

    def own(tensor, dim):
        piece = tensor.detach().chunk(group.size(), dim)[group.rank()].clone()
        return nn.Parameter(piece, requires_grad=tensor.requires_grad)

    wide = model.wide
    wide.base.weight, wide.base.bias = own(wide.base.weight, 0), own(wide.base.bias, 0)
    wide.lora_b = own(wide.lora_b, 0)
    model.back.weight = own(model.back.weight, 1)
    model.leave = lambda partial: _SumForward.apply(partial, group)
    return model


def parallelize_good(model, mesh):
    model = parallelize_bad(model, mesh)

    def complete(parameter):
        dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))

    model.wide.lora_a.register_post_accumulate_grad_hook(complete)
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["wide.lora_a"],
        "mentions": ["wide.lora_a", "tp"],
    },
    "good": {"verdict": "pass"},
}
