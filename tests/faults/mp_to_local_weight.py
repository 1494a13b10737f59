"""A replicated DTensor weight is read with `to_local()` and applied to this rank's tokens. Its
gradient covers those tokens only, yet it is labelled Replicate. The twin declares it with
`grad_placements=[Partial()]`.
Class: https://github.com/pytorch/torchtitan/pull/3412, https://github.com/NVIDIA/apex/issues/1686
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class ScaleNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-5) * self.weight + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ScaleNorm(6)
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 6)

    def forward(self, x, y):
        return F.huber_loss(self.fc2(F.gelu(self.fc1(self.norm(x)))), y)


def get_inputs(step=0):
    return {"x": _noise(900 + step, 2, 6, 6), "y": _noise(930 + step, 2, 6, 6)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def _parallelize(model, mesh, grad_placements):
    plan = {
        "fc1": ColwiseParallel(input_layouts=Shard(1)),
        "fc2": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    norm = model.norm
    for name in ("weight", "bias"):
        whole = getattr(norm, name).detach()
        setattr(norm, name, nn.Parameter(distribute_tensor(whole, mesh, [Replicate()])))

    def forward(x):
        tokens = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        tokens = tokens.to_local()
        weight = norm.weight.to_local(grad_placements=grad_placements)
        bias = norm.bias.to_local(grad_placements=grad_placements)
        return F.rms_norm(tokens, tokens.shape[-1:], eps=1e-5) * weight + bias

    norm.forward = forward
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, None)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, [Partial()])


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["norm.weight", "norm.bias"],
        "mentions": ["norm.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
