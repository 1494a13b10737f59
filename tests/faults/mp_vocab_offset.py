"""Vocabulary-parallel embedding by hand. `bad_offset`: ids are not shifted by the shard's first
row, ranks above 0 answer for foreign ids. `bad_padding`: the GLOBAL padding id is used as local
index, so each shard's row of that number is frozen and the true padding row trains.
Class: https://github.com/pytorch/pytorch/issues/130725 (masks of vocabulary-parallel embeddings)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

VOCAB, PAD = 12, 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4, padding_idx=PAD)
        self.out = nn.Linear(4, 3)
        nn.init.normal_(self.embed.weight)

    def forward(self, ids, label):
        return F.cross_entropy(self.out(torch.sin(self.embed(ids)).sum(1)), label)


def get_inputs(step=0):
    source = torch.Generator().manual_seed(2900 + step)
    ids = torch.randint(0, VOCAB, (8, 5), generator=source)
    ids[::2, 4] = PAD
    return {"ids": ids, "label": torch.randint(0, 3, (8,), generator=source)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_bad_offset():
    return {"tp": 3}


def mesh_bad_padding():
    return {"tp": 2}


def layout_bad_offset():
    return {"embed.weight": [Shard(0)]}


mesh_good_offset, mesh_good_padding = mesh_bad_offset, mesh_bad_padding
layout_good_offset = layout_bad_padding = layout_good_padding = layout_bad_offset


def _parallelize(model, mesh, shift, local_padding):
    group, embed = mesh.get_group("tp"), model.embed
    rows = VOCAB // group.size()
    first = group.rank() * rows
    own = embed.weight.detach().chunk(group.size())[group.rank()]
    embed.weight = nn.Parameter(own.clone())
    padding = local_padding(first, rows)

    def forward(ids):
        local = ids - first if shift else ids
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), embed.weight, padding_idx=padding)
        return _Leave.apply(found * mine[..., None], group)

    embed.forward = forward
    return model


def _right_padding(first, rows):
    return PAD - first if first <= PAD < first + rows else None


def parallelize_bad_offset(model, mesh):
    return _parallelize(model, mesh, False, _right_padding)


def parallelize_bad_padding(model, mesh):
    return _parallelize(model, mesh, True, lambda first, rows: min(PAD, rows - 1))


def parallelize_good_offset(model, mesh):
    return _parallelize(model, mesh, True, _right_padding)


parallelize_good_padding = parallelize_good_offset


def _fault(stage, tensors):
    return {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": stage,
        "tensors": tensors,
        "mentions": ["embed", "tp"],
    }


EXPECT = {
    "bad_offset": _fault("module_outputs", ["embed"]),
    "good_offset": {"verdict": "pass"},
    "bad_padding": _fault("gradients", ["embed.weight"]),
    "good_padding": {"verdict": "pass"},
}
