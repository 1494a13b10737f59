"""An adapter replicated over tp is filled again after the ranks were seeded apart ("so that dropout
differs"): every rank starts from other values, though the adapter counts as one. The twin fills it
before.
Class: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5396
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 8)
        self.back = nn.Linear(8, 5)
        self.adapter = nn.Linear(5, 5)
        self.head = nn.Linear(5, 2)
        self.fill()

    def fill(self):
        source = torch.Generator().manual_seed(torch.initial_seed() + 11)
        for p in self.adapter.parameters():
            nn.init.normal_(p, std=0.3, generator=source)

    def forward(self, x):
        return self.head(self.back(F.relu(self.wide(x))) + self.adapter(x))


def get_inputs(step=0):
    return _noise(6500 + step, 6, 5)


def get_targets(step=0):
    return _noise(6530 + step, 6, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def parallelize_good(model, mesh):
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def parallelize_bad(model, mesh):
    torch.manual_seed(torch.initial_seed() + 100 * mesh.get_local_rank("tp"))
    model.fill()
    return parallelize_good(model, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial"],
        "stage": "initial_state",
        "tensors": ["adapter.weight", "adapter.bias"],
        "mentions": ["adapter.weight", "rank"],
    },
    "good": {"verdict": "pass"},
}
