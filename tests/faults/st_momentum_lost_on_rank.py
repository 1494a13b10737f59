"""The rank that does not write checkpoints drops its optimizer state before each update ("only
rank 0 needs it"), so momentum starts anew there and the replicas part at step 1. The twin reloads
the state on every rank. Class: https://github.com/databricks/flashoptim/issues/3 (state lost)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(9, 6)
        self.deep = nn.Linear(6, 7)
        self.label = nn.Linear(7, 4)

    def forward(self, ids):
        return self.label(torch.tanh(self.deep(self.words(ids))))


def _draw(high, seed, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _draw(9, 301 + step, 6, 4)


def get_targets(step=0):
    return _draw(4, 351 + step, 6)


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.9, dampening=0.1)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, prepare_state):
    ids, label = batch
    optimizer.zero_grad()
    value = F.cross_entropy(model(ids), label)
    value.backward()
    prepare_state(optimizer)
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    keeper = mesh.get_local_rank("dp") < 2
    return _train(model, optimizer, batch, lambda o: None if keeper else o.state.clear())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda o: o.load_state_dict(o.state_dict()))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_state"],
        "stage": "optimizer_state",
        "tensors": ["words.weight", "deep.weight", "label.weight"],
        "mentions": ["momentum_buffer", "deep.weight"],
    },
    "good": {"verdict": "pass"},
}
