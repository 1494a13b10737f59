"""Orthogonalised momentum (Newton-Schulz) on the rows that fully_shard left on this rank: the
rows become orthonormal among themselves only. The twin gathers the momentum, then keeps its rows.
Class: https://github.com/pytorch/pytorch/issues/109581 (matrix optimizers under sharding)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8, bias=False)
        self.value = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        h = self.token(ids)
        score = self.query(h) @ self.key(h).transpose(1, 2) / 8**0.5
        return self.head(h + score.softmax(-1) @ self.value(h))


def _ids(seed):
    return torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(210 + step)


def get_targets(step=0):
    return _ids(260 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _orthogonal(matrix, rounds=6):
    x = matrix / (matrix.norm() + 1e-6)
    wide = x if x.shape[0] <= x.shape[1] else x.t()
    for _ in range(rounds):
        wide = 1.5 * wide - 0.5 * (wide @ wide.t()) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.t()


class MatrixMomentum(torch.optim.Optimizer):
    def __init__(self, params, gather=False):
        super().__init__(params, {"lr": 0.05, "momentum": 0.7})
        self.gather = gather

    def _direction(self, momentum):
        if not isinstance(momentum, DTensor):
            return _orthogonal(momentum)
        if not self.gather:
            return _orthogonal(momentum.to_local())
        mesh = momentum.device_mesh
        parts = _orthogonal(momentum.full_tensor()).chunk(mesh.size(), 0)
        return parts[mesh.get_local_rank()]

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            for p in settings["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].mul_(settings["momentum"]).add_(p.grad)
                local = p.to_local() if isinstance(p, DTensor) else p
                if p.dim() == 2:
                    update = self._direction(momentum)
                else:
                    update = momentum.to_local() if isinstance(momentum, DTensor) else momentum
                local.add_(update, alpha=-settings["lr"])


def get_optimizer(params):
    return MatrixMomentum(params)


def setup_bad(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, MatrixMomentum(model.parameters())


def setup_good(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, MatrixMomentum(model.parameters(), gather=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded"],
        "stage": "parameters",
        "tensors": ["query.weight", "value.weight", "head.weight"],
        "mentions": ["query.weight", "MatrixMomentum"],
    },
    "good": {"verdict": "pass"},
}
