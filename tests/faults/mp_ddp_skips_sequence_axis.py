"""DDP over the data axis of a dp x sp mesh while every sample is cut along its sequence: gradients
are averaged over dp and stay one sp rank's part. The twin gives DDP the ranks of both axes.
Class: https://github.com/ByteDance-Seed/VeOmni/pull/1115
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, 4)
        nn.init.normal_(self.norm.bias)

    def forward(self, series, label):
        logits = self.out(self.norm(F.mish(self.inner(series))))
        return F.cross_entropy(logits.flatten(0, 1), label.flatten())


def get_inputs(step=0):
    source = torch.Generator().manual_seed(1130 + step)
    label = torch.randint(0, 4, (4, 6), generator=source)
    return {"series": _noise(1100 + step, 4, 6, 5), "label": label}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def mesh_bad():
    return {"dp": 2, "sp": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"series": {"dp": 0, "sp": 1}, "label": {"dp": 0, "sp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_good(model, mesh):
    return DistributedDataParallel(model)  # the default group: dp and sp together


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / mesh.size()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction", "no_sync"],
        "stage": "gradients",
        "tensors": [
            "inner.weight",
            "inner.bias",
            "norm.weight",
            "norm.bias",
            "out.weight",
            "out.bias",
        ],
        "mentions": ["out.weight", "sp"],
    },
    "good": {"verdict": "pass"},
}
