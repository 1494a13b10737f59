"""False-alarm trap: the bias of attention keys has no true gradient, only rounding, and so has a
linear bias in front of a mean subtraction. Adam turns the rounding into full steps that differ
between runs.
Compare https://github.com/pytorch/torchtitan/pull/3847 (drift that is only order)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)
        self.score = nn.Linear(6, 1)

    def forward(self, x):
        weights = (self.query(x) @ self.key(x).mT / 6**0.5).softmax(-1)
        score = self.score(x + weights @ self.value(x)).squeeze(-1)
        return score - score.mean(-1, keepdim=True)


def get_inputs(step=0):
    return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(15800 + step))


def get_targets(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(15900 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def mesh_wide():
    return {"dp": 4}


def parallelize_pair(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_wide = parallelize_pair

EXPECT = {"pair": {"verdict": "pass"}, "wide": {"verdict": "pass"}}
