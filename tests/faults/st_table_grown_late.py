"""The embedding table is replaced by a new one (same rows copied, as after resizing a vocabulary)
once the optimizer exists; the optimizer goes on with the old table. The twin puts the new tensor
in its group. Class: https://github.com/mosaicml/examples/pull/11 (an embedding that was replaced)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.rnn = nn.RNN(6, 7, batch_first=True)
        self.head = nn.Linear(7, 10)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0])


def _ids(seed):
    return torch.randint(0, 10, (6, 4), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(66 + step)


def get_targets(step=0):
    return _ids(96 + step)


def loss(output, targets):
    return F.cross_entropy(output.reshape(-1, 10), targets.reshape(-1))


def get_optimizer(params):
    return torch.optim.RMSprop(params, lr=0.01, eps=1e-3)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def _renew_table(model):
    table = nn.Embedding(10, 6, dtype=model.table.weight.dtype)
    table.weight.data.copy_(model.table.weight.data)
    old, model.table = model.table.weight, table
    return old, table.weight


def setup_bad(model, mesh):
    optimizer = get_optimizer(list(model.parameters()))
    _renew_table(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


def setup_good(model, mesh):
    optimizer = get_optimizer(list(model.parameters()))
    old, new = _renew_table(model)
    for settings in optimizer.param_groups:
        settings["params"] = [new if p is old else p for p in settings["params"]]
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": ["optimizer_state", "parameters"],
        "tensors": ["table.weight"],
        "mentions": ["table.weight", "optimizer"],
    },
    "good": {"verdict": "pass"},
}
