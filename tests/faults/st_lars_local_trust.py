"""LARS under fully_shard takes the trust ratio |w| / |update| from the rank's own rows.
The twin sums the squared norms over the group before it divides.
Class: https://github.com/facebookresearch/fairscale/issues/767 (layer-wise optimizers on shards)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 4)
        with torch.no_grad():
            self.inner.weight[:5].mul_(3.0)  # halves of different size, as after training

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


def get_inputs(step=0):
    return _normal(400 + step, 8, 6) * torch.linspace(0.5, 2.0, 8)[:, None]


def get_targets(step=0):
    return _normal(430 + step, 8, 4)


def loss(output, targets):
    return F.mse_loss(output, targets)


class Lars(torch.optim.Optimizer):
    """Plain LARS without momentum; `group` is where norms are summed, None for whole tensors."""

    def __init__(self, params, lr=0.05, decay=0.02, group=None):
        super().__init__(params, {"lr": lr, "weight_decay": decay})
        self.norm_group = group

    def _norm(self, tensor):
        square = tensor.square().sum()
        if self.norm_group is not None:
            dist.all_reduce(square, group=self.norm_group)
        return square.sqrt()

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            for p in settings["params"]:
                w, g = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
                update = g + settings["weight_decay"] * w
                trust = self._norm(w) / (self._norm(update) + 1e-8)
                w.sub_(settings["lr"] * trust * update)


def get_optimizer(params):
    return Lars(params)


def setup_bad(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, Lars(model.parameters())


def setup_good(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, Lars(model.parameters(), group=mesh.get_group("dp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded"],
        "stage": "parameters",
        "tensors": ["inner.weight", "outer.weight"],
        "mentions": ["inner.weight", "Lars"],
    },
    "good": {"verdict": "pass"},
}
