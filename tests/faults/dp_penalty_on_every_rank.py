"""Losses are divided by the global count and gradients summed; the penalty on the embedding is
added in full on every rank and counts four times. The twin adds each rank's quarter.
Class: https://github.com/NVIDIA/Megatron-LM/pull/3768
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

STRENGTH = 0.1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(10, 4)
        self.rate = nn.Linear(4, 1)

    def forward(self, basket):
        return self.rate(torch.relu(self.items(basket)).sum(1)).squeeze(-1)


def get_inputs(step=0):
    g = torch.Generator().manual_seed(14300 + step)
    return {"basket": torch.randint(0, 10, (8, 3), generator=g)}


def get_targets(step=0):
    return torch.rand(8, generator=torch.Generator().manual_seed(14400 + step))


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.8)


def _value(model, batch, count, strength):
    fit = F.l1_loss(model(batch["basket"]), batch["targets"], reduction="sum") / count
    return fit + strength * model.items.weight.square().mean()


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = _value(model, batch, len(batch["targets"]), STRENGTH)
    value.backward()
    optimizer.step()
    return value.detach()


def mesh_bad():
    return {"dp": 4}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, strength):
    optimizer.zero_grad()
    value = _value(model, batch, len(batch["targets"]) * mesh.size(), strength)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, STRENGTH)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, STRENGTH / mesh.size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive"],
        "stage": "loss",
        "tensors": ["items.weight"],
        "mentions": ["items.weight"],
    },
    "good": {"verdict": "pass"},
}
