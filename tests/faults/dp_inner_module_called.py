"""The loss is computed on the module inside the DDP wrapper, so DDP's forward never runs and no
gradient is ever reduced; every rank trains alone. The twin calls the wrapper.
Class: https://github.com/k2-fsa/icefall/issues/226
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.Mish(), nn.Linear(10, 6))
        self.classifier = nn.Linear(6, 4)

    def forward(self, x):
        return self.classifier(x + self.encoder(x))


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(6600 + step))


def get_targets(step=0):
    return torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(6700 + step))


def loss(output, targets):
    return F.multi_margin_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(called, optimizer, batch):
    x, labels = batch
    optimizer.zero_grad()
    value = loss(called(x), labels)
    value.backward()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model.module, optimizer, batch)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync"],
        "stage": "gradients",
        "tensors": ["encoder.0.weight", "encoder.2.weight", "classifier.weight"],
        "mentions": ["forward", "dp"],
    },
    "good": {"verdict": "pass"},
}
