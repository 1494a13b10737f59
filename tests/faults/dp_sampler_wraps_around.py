"""Ten samples on four ranks: the sampler fills up to twelve with the first two, which count twice.
The twin gives three, three, two and two, and divides by ten.
Class: https://github.com/pytorch/pytorch/issues/25162
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 6)
        self.value = nn.Linear(4, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.sigmoid(self.query(x)) * self.value(x)).squeeze(-1)


def get_inputs(step=0):
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(13300 + step))


def get_targets(step=0):
    return torch.randn(10, generator=torch.Generator().manual_seed(13400 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_bad():
    return {"dp": 4}


def input_sharding_bad():
    return {"x": {"dp": None}, "targets": {"dp": None}}  # the sampler takes the rank's part


def parallelize_bad(model, mesh):
    return model


mesh_good, input_sharding_good, parallelize_good = mesh_bad, input_sharding_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, order):
    rank, size = mesh.get_local_rank("dp"), mesh.size()
    mine = order[rank::size]
    optimizer.zero_grad()
    value = F.mse_loss(model(batch[0][mine]), batch[1][mine], reduction="sum") / len(order)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()  # this rank's share of the mean


def step_bad(model, optimizer, batch, mesh):
    order = list(range(batch[0].shape[0]))
    order += order[: -len(order) % mesh.size()]
    return _train(model, optimizer, batch, mesh, order)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, list(range(batch[0].shape[0])))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs", "uneven"],
        "stage": "inputs",
        "tensors": ["query.weight", "value.weight", "out.weight", "out.bias"],
        "mentions": ["10", "12"],
    },
    "good": {"verdict": "pass"},
}
