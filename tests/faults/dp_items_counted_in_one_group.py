"""Hybrid data parallel (2 replicas of 2 shards): the number of labelled items is summed over the
shard group only, so each replica divides by its own count. The twin sums over both axes.
Class: https://github.com/deepspeedai/DeepSpeed/issues/5583
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 12)
        self.logits = nn.Linear(12, 11)

    def forward(self, ids):
        return self.logits(F.gelu(self.inner(self.words(ids))))


def get_inputs(step=0):
    g = torch.Generator().manual_seed(5100 + step)
    return {"ids": torch.randint(0, 11, (8, 5), generator=g)}


def get_targets(step=0):
    g = torch.Generator().manual_seed(5200 + step)
    labels = torch.randint(0, 11, (8, 5), generator=g)
    labels[:4, 1:] = -100  # replica 0: 4 items, replica 1: 20
    return labels


def loss(output, targets):
    return F.cross_entropy(output.transpose(1, 2), targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def mesh_bad():
    return {"replicate": 2, "shard": 2}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model)  # all four ranks


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, axes):
    optimizer.zero_grad()
    items = (batch["targets"] != -100).sum()
    divisor = mesh.size()
    for axis in axes:
        dist.all_reduce(items, group=mesh.get_group(axis))
        divisor //= mesh[axis].size()
    total = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["targets"], reduction="sum")
    value = total * (mesh.size() // divisor) / items  # DDP takes the mean over all ranks
    value.backward()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, ["shard"])


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, ["shard", "replicate"])


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["words.weight", "inner.weight", "logits.weight", "logits.bias"],
        "mentions": ["replicate", "4", "20"],
    },
    "good": {"verdict": "pass"},
}
