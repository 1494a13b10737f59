"""The backbone is frozen while DDP is built and unfrozen right after, to save memory at start-up;
DDP put hooks only on what required gradients then. The twin unfreezes before wrapping.
Class: https://github.com/pytorch/PiPPy/issues/1133 (parameters outside of the reducer)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.GRU(4, 5)
        self.probe = nn.Linear(5, 4)

    def forward(self, series):
        return self.probe(self.backbone(series)[0])


def get_inputs(step=0):
    return torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(7200 + step))


def get_targets(step=0):
    return torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(7300 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.RMSprop(params, lr=0.01, eps=1e-3)


def input_sharding():
    return {"series": {"dp": 1}, "targets": {"dp": 1}}  # time first


def _wrap(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_bad(model, mesh):
    model.backbone.requires_grad_(False)
    ddp = _wrap(model, mesh)
    model.backbone.requires_grad_(True)
    return ddp


def parallelize_good(model, mesh):
    model.backbone.requires_grad_(False)
    model.backbone.requires_grad_(True)
    return _wrap(model, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync", "missing_reduction", "unused"],
        "stage": "gradients",
        "tensors": ["backbone.weight_ih_l0", "backbone.weight_hh_l0", "backbone.bias_ih_l0"],
        "mentions": ["backbone.weight_ih_l0", "dp"],
    },
    "good": {"verdict": "pass"},
}
