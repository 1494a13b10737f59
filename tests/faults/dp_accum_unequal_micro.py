"""Accumulation over micro-batches of 2, 2 and 1 rows: every micro-batch mean gets the weight 1/3,
so the short last one counts double. The twin weighs each micro-batch by its rows.
Class: https://github.com/huggingface/transformers/pull/35438
"""

from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 6, batch_first=True)
        self.readout = nn.Linear(6, 2)

    def forward(self, series):
        return self.readout(self.gru(series)[0][:, -1])


def get_inputs(step=0):
    return torch.randn(10, 4, 3, generator=torch.Generator().manual_seed(4500 + step))


def get_targets(step=0):
    return 2 * torch.randn(10, 2, generator=torch.Generator().manual_seed(4600 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.25)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _accumulate(model, optimizer, batch, by_rows):
    optimizer.zero_grad()
    pairs = list(zip(batch[0].split(MICRO), batch[1].split(MICRO), strict=True))
    reported = 0.0
    for i, (series, wanted) in enumerate(pairs):
        share = series.shape[0] / batch[0].shape[0] if by_rows else 1 / len(pairs)
        with nullcontext() if i == len(pairs) - 1 else model.no_sync():
            part = loss(model(series), wanted) * share
            part.backward()
        reported = reported + part.detach()
    optimizer.step()
    return reported


def step_bad(model, optimizer, batch, mesh):
    return _accumulate(model, optimizer, batch, by_rows=False)


def step_good(model, optimizer, batch, mesh):
    return _accumulate(model, optimizer, batch, by_rows=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["gru.weight_ih_l0", "gru.weight_hh_l0", "readout.weight", "readout.bias"],
        "mentions": ["readout.bias"],
    },
    "good": {"verdict": "pass"},
}
