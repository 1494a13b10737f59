"""Hand-written reduction that walks over the child modules: the temperature and the class vector,
which are parameters of the root itself, are never reduced. The twin walks over all parameters.
Class: https://github.com/EleutherAI/gpt-neox/pull/1257 (a group of small parameters left unsummed)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(6))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.project = nn.Linear(4, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)
        nn.init.uniform_(self.attend.out_proj.bias, 0.2, 0.5)

    def forward(self, points):
        keys = self.project(points)
        query = self.cls.expand(points.shape[0], 1, 6)
        pooled = self.attend(query, keys, keys, need_weights=False)[0]
        return self.out(pooled.squeeze(1)) * self.temperature


def get_inputs(step=0):
    return {"points": torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(7600 + step))}


def get_targets(step=0):
    return torch.randint(0, 3, (9,), generator=torch.Generator().manual_seed(7700 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, parameters):
    optimizer.zero_grad()
    value = loss(model(batch["points"]), batch["targets"]) / mesh.size()
    value.backward()
    for p in parameters:
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()  # this rank's share


def step_bad(model, optimizer, batch, mesh):
    listed = [p for child in model.children() for p in child.parameters()]
    return _train(model, optimizer, batch, mesh, listed)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, model.parameters())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction", "no_sync"],
        "stage": "gradients",
        "tensors": ["cls", "temperature"],
        "mentions": ["cls", "temperature", "dp"],
    },
    "good": {"verdict": "pass"},
}
