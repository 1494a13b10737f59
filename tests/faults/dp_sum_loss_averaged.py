"""A loss that sums over the batch, under DDP, which always averages: gradients come out one third
of the single-device ones on three ranks. The twin multiplies the loss by the number of ranks.
Class: https://github.com/pytorch/PiPPy/pull/536
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3)
        self.norm = nn.GroupNorm(3, 6)
        self.out = nn.Linear(6, 4)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, wave):
        return self.out(F.leaky_relu(self.norm(self.conv(wave))).mean(-1))


def get_inputs(step=0):
    return torch.randn(6, 2, 9, generator=torch.Generator().manual_seed(5300 + step))


def get_targets(step=0):
    return torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(5400 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_good(model, optimizer, batch, mesh):
    wave, labels = batch
    optimizer.zero_grad()
    value = loss(model(wave), labels)
    (value * mesh.size()).backward()
    optimizer.step()
    return value.detach()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "out.weight"],
        "mentions": ["0.333", "dp"],
    },
    "good": {"verdict": "pass"},
}
