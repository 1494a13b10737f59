"""The learning-rate schedule advances once for every rank instead of once per step, so from the
second step on the rate is too low. The twin advances once.
Class: https://github.com/huggingface/accelerate/issues/2142
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

DECAY = 0.8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(9, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9)

    def forward(self, ids):
        h = self.token(ids).mean(1)
        return self.head(h + F.relu(self.hidden(h)))


def get_inputs(step=0):
    return torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(13500 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(13600 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.05)


def _train(model, optimizer, batch, advances):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= DECAY**advances
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, 1)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh.size())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "inputs",  # of step 1: the rate before it is 0.0256, not 0.04
        "tensors": ["token.weight", "hidden.weight", "head.weight", "head.bias"],
        "mentions": ["lr", "0.04"],
    },
    "good": {"verdict": "pass"},
}
