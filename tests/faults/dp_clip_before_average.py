"""Gradients are clipped on each rank and averaged afterwards; ranks with large local norms are cut,
the others are not. The twin averages first. Both use torch's own clipping.
Class: https://github.com/tenstorrent/tt-metal/pull/16771
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MAX_NORM = 0.4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def get_inputs(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(8400 + step))


def get_targets(step=0):
    wanted = torch.randn(8, 3, generator=torch.Generator().manual_seed(8500 + step))
    return wanted * torch.tensor([4.0, 4.0, 4.0, 4.0, 0.3, 0.3, 0.3, 0.3])[:, None]


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return value.detach()


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _average(model, mesh):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    _average(model, mesh)
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    _average(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return value.detach()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip"],
        "stage": ["clipping", "gradients"],  # torch's clipping is given one rank's gradients
        "tensors": ["first.weight", "first.bias", "second.weight", "second.bias"],
        "mentions": ["clip"],
    },
    "good": {"verdict": "pass"},
}
