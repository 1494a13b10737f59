"""`parallelize_module` gives the embedding and the tied head a new parameter each, both cut by
vocabulary rows: the tie is gone without a word and the two uses train apart. The twin ties them
again.
Class: https://github.com/pytorch/torchtune/issues/616, https://github.com/mosaicml/examples/pull/11
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB = 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.back(F.gelu(self.wide(x))))


def get_inputs(step=0):
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(3200 + step))


def get_targets(step=0):
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(3230 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, foreach=False)


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "wide": ColwiseParallel(),
        "back": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def parallelize_good(model, mesh):
    model = parallelize_bad(model, mesh)
    model.head.weight = model.embed.weight
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["tied"],
        "stage": ["initial_state", "gradients"],
        "tensors": ["embed.weight"],
        "mentions": ["embed.weight", "head.weight"],
    },
    "good": {"verdict": "pass"},
}
