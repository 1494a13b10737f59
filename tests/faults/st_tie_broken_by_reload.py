"""Table and output layer share a weight; the style reloads a checkpoint into new parameters, one
for each name, and the tie is gone: either copy gets one use's gradient. The twin ties again.
Class: https://github.com/meta-pytorch/torchtune/issues/616 (a reload that breaks the tie)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.mix(self.table(ids))))


def _ids(seed):
    return torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(151 + step)


def get_targets(step=0):
    return _ids(161 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.3)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def _reload(model):
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in saved.items():
        owner, key = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), key, nn.Parameter(value))


def parallelize_bad(model, mesh):
    _reload(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_good(model, mesh):
    _reload(model)
    model.out.weight = model.table.weight
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["tied"],
        "stage": ["initial_state", "gradients"],
        "tensors": ["table.weight"],
        "mentions": ["table.weight", "out.weight"],
    },
    "good": {"verdict": "pass"},
}
