"""False-alarm trap: torch's own sequence parallelism. Norms and residuals live on sequence shards,
projections on columns and rows, norm gradients arrive as Partial DTensors until something reads
them.
Compare https://github.com/NVIDIA/Megatron-LM/issues/1446 (a gradient judged before it was finished)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 8, bias=False)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.ffn = FeedForward()
        self.last = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.last(x + self.ffn(self.norm(x))))


def get_inputs(step=0):
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(5600 + step))


def get_targets(step=0):
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(5630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, foreach=False)


def mesh_sequence():
    return {"tp": 2}


def parallelize_sequence(model, mesh):
    cut, whole = Shard(1), Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=cut, use_local_output=False),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }
    plan["embed"].use_local_output = False
    return parallelize_module(model, mesh, plan)


EXPECT = {"sequence": {"verdict": "pass"}}
