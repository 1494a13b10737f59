"""Eight samples on three ranks, the last part filled up with a row of zeros. The bad style trains
on the filling; the twin runs the model on it too, which is harmless, but keeps it out of the loss.
Class: https://github.com/huggingface/transformers/pull/41832
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


def get_inputs(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(13900 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(14000 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


def mesh_bad():
    return {"dp": 3}


def input_sharding_bad():
    return {"x": {"dp": None}, "targets": {"dp": None}}


def parallelize_bad(model, mesh):
    return model


mesh_good, input_sharding_good, parallelize_good = mesh_bad, input_sharding_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, filling):
    x, labels = batch
    n = -(-x.shape[0] // mesh.size())
    missing = n * mesh.size() - x.shape[0]
    x = F.pad(x, (0, 0, 0, missing)).split(n)[mesh.get_local_rank("dp")]
    labels = F.pad(labels, (0, missing), value=filling).split(n)[mesh.get_local_rank("dp")]
    optimizer.zero_grad()
    counted = torch.tensor(float((labels >= 0).sum()))
    dist.all_reduce(counted, group=mesh.get_group("dp"))
    value = F.cross_entropy(model(x), labels, ignore_index=-1, reduction="sum") / counted
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, filling=0)  # a class like any other


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, filling=-1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["uneven", "inputs", "mean_of_means"],
        "stage": ["inputs", "loss"],
        "tensors": ["inner.weight", "inner.bias", "outer.weight", "outer.bias"],
        "mentions": ["8", "9"],
    },
    "good": {"verdict": "pass"},
}
