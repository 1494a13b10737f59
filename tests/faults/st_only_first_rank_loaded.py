"""Rank 0 has the checkpoint, the others fresh random layers "that the wrapper will overwrite" - but
fully_shard broadcasts nothing, so shards of three models are mixed. The twin broadcasts first.
Class: https://github.com/allenai/OLMo-core/pull/319 (every replica another model)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def _ids(seed, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pieces = nn.Embedding(9, 6)
        self.block = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        h = self.pieces(ids)
        return self.head(self.norm(h + self.block(h)))


def get_inputs(step=0):
    return _ids(512 + step, 9, 6, 3)


def get_targets(step=0):
    return _ids(562 + step, 9, 6, 3)


def loss(output, targets):
    return F.cross_entropy(output.transpose(1, 2), targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def _fresh_layers(model, rank):
    torch.manual_seed(1000 + rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def parallelize_bad(model, mesh):
    if mesh.get_local_rank("dp") > 0:
        _fresh_layers(model, mesh.get_local_rank("dp"))
    return fully_shard(model, mesh=mesh)


def parallelize_good(model, mesh):
    if mesh.get_local_rank("dp") > 0:
        _fresh_layers(model, mesh.get_local_rank("dp"))
    for p in model.parameters():
        dist.broadcast(p.detach(), group=mesh.get_group("dp"), group_src=0)
    return fully_shard(model, mesh=mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial"],
        "stage": "initial_state",
        "tensors": ["pieces.weight", "block.0.weight", "head.weight"],
        "mentions": ["pieces.weight", "initial_state"],
    },
    "good": {"verdict": "pass"},
}
