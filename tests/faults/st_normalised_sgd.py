"""SGD on the gradient divided by its global norm, parameters sharded over one axis and replicated
over the other. `bad_shard` sees its own shard's norm; `bad_world` sums over all four ranks and so
counts every replica, sqrt(2) too much. Class: https://github.com/allenai/OLMo/pull/601 (own norms)
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
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.mix = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, image):
        return self.head(F.elu(self.mix(F.elu(self.stem(image)))).mean((2, 3)))


def get_inputs(step=0):
    return _normal(611 + step, 8, 2, 5, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(641 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


class NormalisedSGD(torch.optim.Optimizer):
    """`sum_over` lists the groups over which the squared norm of local gradients is summed."""

    def __init__(self, params, sum_over=()):
        super().__init__(params, {"lr": 0.1})
        self.sum_over = sum_over

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for settings in self.param_groups for p in settings["params"]]
        grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
        square = torch.stack([g.square().sum() for g in grads]).sum()
        for group in self.sum_over:
            dist.all_reduce(square, group=group)
        for p, g in zip(params, grads, strict=True):
            local = p.to_local() if isinstance(p, DTensor) else p
            local.sub_(self.param_groups[0]["lr"] * g / (square.sqrt() + 1e-6))


def get_optimizer(params):
    return NormalisedSGD(params)


def mesh_bad_shard():
    return {"replicate": 2, "shard": 2}


mesh_bad_world = mesh_good = mesh_bad_shard


def setup_bad_shard(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, NormalisedSGD(model.parameters())


def setup_bad_world(model, mesh):
    fully_shard(model, mesh=mesh)
    groups = [mesh.get_group("replicate"), mesh.get_group("shard")]
    return model, NormalisedSGD(model.parameters(), groups)


def setup_good(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, NormalisedSGD(model.parameters(), [mesh.get_group("shard")])


def _fault(*more):
    return {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded", "norm_clip", *more],
        "stage": "parameters",
        "tensors": ["stem.weight", "mix.weight", "head.weight"],
        "mentions": ["head.weight"],
    }


EXPECT = {
    "bad_shard": _fault(),
    "bad_world": _fault("factor"),
    "good": {"verdict": "pass"},
}
