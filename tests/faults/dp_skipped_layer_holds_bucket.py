"""DDP with default flags; the schedule skips a layer in the last step. Its bucket never fills, so
nothing in it is reduced, and only the next forward would complain. The twin sets
find_unused_parameters.
Class: https://github.com/pytorch/pytorch/pull/124193
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x, keep):
        h = torch.tanh(self.first(x))
        if keep:
            h = h + torch.tanh(self.extra(h))
        return self.last(h)


def get_inputs(step=0):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(12600 + step))
    return {"x": x, "keep": torch.tensor(step < 2)}


def get_targets(step=0):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(12700 + step))


def input_sharding():
    return {"keep": {"dp": None}}


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_good(model, mesh):
    return DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch["x"], batch["keep"]), batch["targets"])
    value.backward()
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused", "no_sync"],
        "stage": "gradients",
        "tensors": ["first.weight", "last.weight"],
        "mentions": ["extra"],
    },
    "good": {"verdict": "pass"},
}
