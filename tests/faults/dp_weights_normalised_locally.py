"""Importance-weighted regression on four ranks: each rank divides by the sum of its own weights,
which differ by orders of magnitude between ranks. The twin divides by the sum over all ranks.
Class: https://github.com/huggingface/transformers/pull/41832
"""

import torch
import torch.distributed as dist
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 10)
        self.out = nn.Linear(10, 2)

    def forward(self, features):
        return self.out(torch.sin(self.hidden(features)))


def get_inputs(step=0):
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(4900 + step)),)


def get_targets(step=0):
    g = torch.Generator().manual_seed(5000 + step)
    weights = torch.exp(1.5 * torch.randn(8, 1, generator=g))
    return torch.randn(8, 2, generator=g), weights


def _weighted(output, wanted, weights):
    return (weights * (output - wanted).abs()).sum()


def loss(output, targets):
    return _weighted(output, *targets) / targets[1].sum()


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def mesh_bad():
    return {"dp": 4}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, global_sum):
    features, wanted, weights = batch
    group = mesh.get_group("dp")
    optimizer.zero_grad()
    total = weights.sum()
    if global_sum:
        dist.all_reduce(total, group=group)
        total = total / mesh.size()
    value = _weighted(model(features), wanted, weights) / total
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, global_sum=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, global_sum=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["hidden.weight", "hidden.bias", "out.weight", "out.bias"],
        "mentions": ["out.weight"],
    },
    "good": {"verdict": "pass"},
}
