"""The twin of st_update_behind_batch_norm: the same model, and an optimizer that does nothing else
on any rank. What differs is what the styles mean.
Class: https://github.com/pytorch/pytorch/issues/22192
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.last = nn.Linear(9, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def get_inputs():
    return torch.randn(8, 6)


def loss(output):
    return (output - torch.arange(4)).square().mean()


class Plain(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)


def get_optimizer(params):
    return Plain(params, lr=0.05, momentum=0.9)


MEANING = {"verdict": "semantic", "kind": ["batch_statistics"], "mentions": ["norm"]}
EXPECT = {"ddp": MEANING, "fsdp2": MEANING, "zero1": MEANING, "pp": MEANING}
