"""One device trains biases and norms without weight decay and at half the rate; the sharded setup
hands the optimizer one flat list, so the second group is lost. The twin regroups by name.
Class: https://github.com/huggingface/accelerate/issues/2926 (other hyper-parameters in parallel)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8)

    def forward(self, ids):
        h = self.table(ids)
        return self.head(self.norm(h + F.hardtanh(self.inner(h))))


def _ids(seed):
    return torch.randint(0, 8, (4, 5), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(621 + step)


def get_targets(step=0):
    return _ids(631 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    decayed = [p for p in params if p.dim() > 1]
    rest = [p for p in params if p.dim() == 1]
    groups = [{"params": decayed}, {"params": rest, "lr": 0.01, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.2)


def setup_bad(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)


def setup_good(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, get_optimizer(list(model.parameters()))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": ["inputs", "parameters"],
        "tensors": ["inner.bias", "norm.weight", "norm.bias", "head.bias"],
        "mentions": ["weight_decay", "norm.weight"],
    },
    "good": {"verdict": "pass"},
}
