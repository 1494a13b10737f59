"""fully_shard is applied to the blocks and the root is forgotten: embedding, positions and head
stay plain parameters that nobody reduces. The twin shards the root last.
Class: https://github.com/Tencent-Hunyuan/UniRL/pull/410 (the layout in force is not the one meant)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.uniform_(self.norm.bias, -0.3, 0.3)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.places = nn.Parameter(torch.randn(4, 6))
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_inputs(step=0):
    return torch.randint(0, 9, (8, 4), generator=torch.Generator().manual_seed(7400 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (8, 4), generator=torch.Generator().manual_seed(7500 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_bad():
    return {"fsdp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


def parallelize_good(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync", "missing_reduction"],
        "stage": "gradients",
        "tensors": ["words.weight", "places", "head.weight", "head.bias"],
        "mentions": ["words.weight", "fsdp"],
    },
    "good": {"verdict": "pass"},
}
