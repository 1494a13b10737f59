"""Low-rank adapters on tensor-parallel layers; the second factor starts at zero, so the first
factor's gradient is zero at step 0 and only later seen to be this rank's part. The fault shows from
step 1 on.
Class: https://github.com/radixark/miles/pull/2723
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Adapter(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, 2))

    def read(self, parameter):
        return parameter

    def forward(self, x):
        return x @ self.read(self.a).t() @ self.read(self.b).t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 8)
        self.adapter = Adapter(5, 8)
        self.back = nn.Linear(8, 3)

    def forward(self, x):
        return self.back(F.gelu(self.wide(x) + self.adapter(x)))


def get_inputs(step=0):
    return _noise(6200 + step, 7, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (7,), generator=torch.Generator().manual_seed(6230 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def _parallelize(model, mesh, grad_placements):
    adapter = model.adapter
    parallelize_module(model, mesh, {"wide": ColwiseParallel(), "back": RowwiseParallel()})
    adapter.a = nn.Parameter(distribute_tensor(adapter.a.detach(), mesh, [Replicate()]))
    adapter.b = nn.Parameter(distribute_tensor(adapter.b.detach(), mesh, [Shard(0)]))

    def read(parameter: DTensor):
        whole = parameter.placements[0].is_replicate()
        return parameter.to_local(grad_placements=grad_placements if whole else None)

    adapter.read = read
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
        "tensors": ["adapter.a"],
        "mentions": ["adapter.a", "tp", "step 1"],
    },
    "good": {"verdict": "pass"},
}
