"""Fine-tuning: the classifier is replaced by the task's own after DDP was built. The new parameters
are no part of DDP's buckets and are never reduced. The twin replaces first and wraps then.
Class: https://github.com/hao-ai-lab/FastVideo/pull/1666
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Conv1d(3, 6, 2)
        self.norm = nn.BatchNorm1d(6).eval()
        self.classifier = nn.Linear(6, 5)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()  # fine-tuning keeps the statistics
        return self

    def forward(self, x):
        return self.classifier(F.relu(self.norm(self.trunk(x))).amax(-1))


def get_inputs(step=0):
    return torch.randn(12, 3, 6, generator=torch.Generator().manual_seed(7000 + step))


def get_targets(step=0):
    return torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(7100 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def _replace(model):
    model.classifier = copy.deepcopy(model.classifier)  # same values, new parameter objects


def parallelize_bad(model, mesh):
    ddp = DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )
    _replace(ddp.module)
    return ddp


def parallelize_good(model, mesh):
    _replace(model)
    return DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync", "missing_reduction"],
        "stage": "gradients",
        "tensors": ["classifier.weight", "classifier.bias"],
        "mentions": ["classifier.weight", "dp"],
    },
    "good": {"verdict": "pass"},
}
