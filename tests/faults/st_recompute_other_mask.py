"""Activation checkpointing without keeping the generator state: the recomputed block drops other
units than the forward did, so the loss is right and the block's gradient is not. The twin keeps
the state. Class: https://github.com/pytorch/pytorch/issues/190758 (recompute, fresh randomness)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.widen = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6)

    def keep(self, shape):
        return torch.rand(shape) < 0.7

    def forward(self, x):
        h = F.gelu(self.widen(self.norm(x)))
        return x + self.narrow(h * self.keep(h.shape) / 0.7)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.block = Block()
        self.head = nn.Linear(6, 12)

    def through_block(self, h):
        return self.block(h)

    def forward(self, ids):
        return self.head(self.through_block(self.table(ids)))


def _ids(seed):
    return torch.randint(0, 12, (6, 4), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(246 + step)


def get_targets(step=0):
    return _ids(296 + step)


def loss(output, targets):
    return F.cross_entropy(output.transpose(1, 2), targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def _wrap(model, mesh, keep_state):
    size, rank, draw = mesh.size(), mesh.get_local_rank("dp"), model.block.keep

    def keep(shape):  # the rows of the mask that one device would draw
        return draw((shape[0] * size, *shape[1:])).chunk(size)[rank]

    model.block.keep = keep
    model.through_block = lambda h: checkpoint(
        model.block, h, use_reentrant=False, preserve_rng_state=keep_state
    )
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_bad(model, mesh):
    return _wrap(model, mesh, False)


def parallelize_good(model, mesh):
    return _wrap(model, mesh, True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["random_stream"],
        "stage": "gradients",
        "tensors": ["block.narrow.weight", "block.widen.weight", "table.weight"],
        "mentions": ["block.narrow.weight", "random"],
    },
    "good": {"verdict": "pass"},
}
