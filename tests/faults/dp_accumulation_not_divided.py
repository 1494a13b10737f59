"""Four equal micro-batches under DDP and no_sync, gradients added up without dividing by the number
of micro-batches; the logged loss is averaged and looks right. The twin divides each micro-batch's
loss.
Class: https://github.com/huggingface/transformers/issues/37766
"""

from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, 8)
        self.norm = nn.RMSNorm(8)
        self.drop_to = nn.Linear(8, 3)

    def forward(self, points):
        return self.drop_to(self.norm(F.elu(self.lift(points))))


def get_inputs(step=0):
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(5900 + step))


def get_targets(step=0):
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(6000 + step))


def loss(output, targets):
    return F.smooth_l1_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, divide_by):
    optimizer.zero_grad()
    values = []
    micro = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    for i, (points, wanted) in enumerate(micro, start=1):
        with nullcontext() if i == MICRO_BATCHES else model.no_sync():
            value = loss(model(points), wanted)
            (value / divide_by).backward()
        values.append(value.detach())
    optimizer.step()
    return torch.stack(values).mean()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, MICRO_BATCHES)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["lift.weight", "lift.bias", "norm.weight", "drop_to.weight", "drop_to.bias"],
        "mentions": ["4"],
    },
    "good": {"verdict": "pass"},
}
