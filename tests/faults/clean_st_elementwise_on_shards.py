"""False-alarm trap: a hand-written optimizer that works on to_local() shards, as the faulty LARS
and LAMB do - but it is element by element (a softened Lion), so shards are enough.
Compare https://github.com/facebookresearch/fairscale/issues/767 (which optimizers may be sharded)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 2)
        self.mid = nn.Linear(5, 7)
        self.out = nn.Linear(7, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(torch.tanh(self.conv(x)).mean(-1))))


def get_inputs(step=0):
    return _normal(714 + step, 8, 3, 5)


def get_targets(step=0):
    return _normal(724 + step, 8, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


class SoftLion(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            fast, slow = settings["betas"]
            for p in settings["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                w, g, m = (
                    t.to_local() if isinstance(t, DTensor) else t
                    for t in (p, p.grad, state["exp_avg"])
                )
                direction = torch.tanh(8 * (fast * m + (1 - fast) * g))
                w.mul_(1 - settings["lr"] * settings["weight_decay"])
                w.sub_(settings["lr"] * direction)
                m.lerp_(g, 1 - slow)


def get_optimizer(params):
    return SoftLion(params)


def mesh_rows():
    return {"dp": 3}


def mesh_hybrid():
    return {"replicate": 2, "shard": 2}


def input_sharding_rows():
    return {"x": {"dp": None}, "targets": {"dp": None}}  # eight samples: see `step_rows`


def parallelize_rows(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_hybrid = parallelize_rows


def step_rows(model, optimizer, batch, mesh):
    total, rank = batch[0].shape[0], mesh.get_local_rank("dp")
    x, y = (t.tensor_split(mesh.size())[rank] for t in batch)
    optimizer.zero_grad()
    value = loss(model(x), y)
    (value * (x.shape[0] * mesh.size() / total)).backward()
    optimizer.step()
    return value.detach() * (x.shape[0] / total)


EXPECT = {"rows": {"verdict": "pass"}, "hybrid": {"verdict": "pass"}}
