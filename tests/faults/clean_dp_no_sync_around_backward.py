"""False-alarm trap: no_sync around backward only looks as if nothing were reduced; DDP decides in
forward, so it still reduces, in every micro-batch, and averages of averages stay right.
Compare https://github.com/huggingface/accelerate/pull/1726
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(4, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x, y):
        return self.out(torch.tanh(self.left(x)) * torch.sigmoid(self.right(y)))


def get_inputs(step=0):
    g = torch.Generator().manual_seed(16400 + step)
    return torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)


def get_targets(step=0):
    return torch.rand(8, 1, generator=torch.Generator().manual_seed(16500 + step)).round()


def loss(output, targets):
    return F.binary_cross_entropy_with_logits(output, targets)


def get_optimizer(params):
    return torch.optim.RMSprop(params, lr=0.01, eps=1e-2)


def parallelize_backward_only(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def step_backward_only(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = 0.0
    for x, y, wanted in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
        value = loss(model(x, y), wanted) / MICRO_BATCHES
        with model.no_sync():
            value.backward()
        total = total + value.detach()
    optimizer.step()
    return total


EXPECT = {"backward_only": {"verdict": "pass"}}
