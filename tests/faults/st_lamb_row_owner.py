"""LAMB with hand-sharded state: a rank updates its rows only, and so sees |w| and |u| of those.
The twin takes both norms over the three owners. Momentum and variance are right in both.
Class: https://github.com/pytorch/pytorch/issues/109581 (optimizers that need the whole tensor)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.conv(x))).mean(-1))


def get_inputs(step=0):
    return _noise(17 + step, 6, 3, 9) + 0.3


def get_targets(step=0):
    return torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(71 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, mesh=None, whole_norms=True):
        super().__init__(params, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.01})
        self.ranks = 1 if mesh is None else mesh.size()
        self.me = 0 if mesh is None else mesh.get_local_rank()
        self.group = None if mesh is None else mesh.get_group()
        self.whole_norms = whole_norms

    def _norm(self, piece):
        square = piece.square().sum()
        if self.group is not None and self.whole_norms:
            dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def _rows(self, p, rank):
        each = -(-p.shape[0] // self.ranks)
        return p[min(rank * each, p.shape[0]) : (rank + 1) * each]

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            b1, b2 = settings["betas"]
            for p in settings["params"]:
                w, g = self._rows(p, self.me), self._rows(p.grad, self.me)
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
                state["exp_avg"].lerp_(g, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-3)
                update += settings["weight_decay"] * w
                w -= settings["lr"] * self._norm(w) / self._norm(update).clamp_min(1e-12) * update
                for rank in range(self.ranks if self.group is not None else 0):
                    dist.broadcast(self._rows(p, rank), group=self.group, group_src=rank)


def get_optimizer(params):
    return Lamb(params)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    optimizer = Lamb(model.parameters(), mesh, whole_norms=False)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


def setup_good(model, mesh):
    optimizer = Lamb(model.parameters(), mesh)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded"],
        "stage": "parameters",
        "tensors": ["conv.weight", "head.weight"],
        "mentions": ["conv.weight", "Lamb"],
    },
    "good": {"verdict": "pass"},
}
