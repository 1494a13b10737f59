"""A learning rate that warms up within the step, from a count of its own on every rank: rank 1 has
another slope. Also a second micro-batch whose loss is not divided: the excess of the logged loss is
some multiple of every number the loss is made of, and none of them is counted too often. And
parameters that the style writes from a flat copy: the one it leaves out is stale, not replaced.
Class: https://github.com/huggingface/accelerate/issues/2142
"""

import torch
import torch.distributed as dist
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h) * self.scale, h


def get_inputs(step=0):
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(2400 + step))]


def get_targets(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(2450 + step))


def loss(output, targets):
    values, hidden = output
    return nn.functional.mse_loss(values, targets) + 0.01 * hidden.square().mean()


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.2)


def _warm(optimizer, slope):
    for group in optimizer.param_groups:
        group["count"] = group.get("count", 0) + 1
        group["lr"] = 1e-2 * group["count"] / slope


def step(model, optimizer, batch):
    _warm(optimizer, 5)
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach()


def parallelize_warm(model, mesh):
    return model


parallelize_undivided = parallelize_good = parallelize_warm


def _train(model, optimizer, batch, mesh, slope, divisors):
    _warm(optimizer, slope)
    optimizer.zero_grad()
    total = torch.zeros(())
    for x, y, n in zip(batch[0].chunk(2), batch[1].chunk(2), divisors, strict=True):
        value = loss(model(x), y) / n
        value.backward()
        total = total + value.detach()
    for p in [*model.parameters()]:
        dist.all_reduce(p.grad)
        p.grad /= mesh.size()
    optimizer.step()
    dist.all_reduce(total)
    return total / mesh.size()


def step_warm(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 5 + mesh.get_rank(), (2, 2))


def step_undivided(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 5, (2, 1))


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 5, (2, 2))


def setup_left(model, mesh):
    parts = [p.detach().flatten() for p in model.parameters()]
    flat = nn.Parameter(torch.cat(parts))
    return model, torch.optim.AdamW([flat], lr=1e-2, weight_decay=0.2)


setup_whole = setup_left


def _write(model, optimizer, batch, mesh, skipped):
    _warm(optimizer, 5)
    model.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    flat = optimizer.param_groups[0]["params"][0]
    flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat.grad)
    flat.grad /= mesh.size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat.grad[at : at + p.numel()].view_as(p))
        at += p.numel()
    optimizer.step()
    at = 0
    for name, p in model.named_parameters():
        if name != skipped:
            p.data.copy_(flat.detach()[at : at + p.numel()].view_as(p))
        at += p.numel()
    return value.detach()


def step_left(model, optimizer, batch, mesh):
    return _write(model, optimizer, batch, mesh, "scale")


def step_whole(model, optimizer, batch, mesh):
    return _write(model, optimizer, batch, mesh, "")


EXPECT = {
    "warm": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "parameters",
        "tensors": ["lr", "last.weight"],
        "mentions": ["rank 1", "0.8333 x", "within the step"],
    },
    "undivided": {
        "verdict": "mismatch",
        "kind": ["mean_of_means", "factor", "unexplained"],
        "stage": "loss",
        "never": ["counts a term of the loss"],
    },
    "left": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "parameters",
        "tensors": ["scale"],
        "never": ["built before"],
    },
    "good": {"verdict": "pass"},
    "whole": {"verdict": "pass"},
}
