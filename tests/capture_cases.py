"""A small model, its ordinary step, and the check both capture suites use."""

from __future__ import annotations

import torch
from replay import compare
from torch import nn


def batches(count=4, rows=6, width=4):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, width, generator=generator),) for _ in range(count)]


def check(build, step, given=None, most_captures=3):
    """Compare with fresh captures and with reuse; bitwise, generator included."""
    given = batches() if given is None else given
    for reuse in (False, True):
        found, replay = compare(build, step, given, reuse)
        assert not found, found
    assert replay.captures <= most_captures, replay.captures


def linear(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
    def build():
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, optimizer(model.parameters())

    return build


def train(loss_of):
    """Return the ordinary step around a loss."""

    def step(model, optimizer, *batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def squares(model, x):
    return model(x).square().sum()
