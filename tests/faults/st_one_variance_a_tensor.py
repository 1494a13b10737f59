"""Adam with one second moment a tensor, rows split 3 + 2. `bad_own`: each rank the mean square of
its rows. `bad_equal`: the two means averaged with equal weights. The twins weigh by element counts.
Class: https://github.com/facebookresearch/fairscale/issues/767 (statistics of a shard)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _values(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 5)

    def forward(self, x, y):
        return F.smooth_l1_loss(self.second(F.softplus(self.first(x))), y)


def get_inputs(step=0):
    scale = torch.tensor([0.2, 0.5, 1.0, 2.0, 4.0])
    return {"x": _values(82 + step, 6, 4), "y": _values(92 + step, 6, 5) * scale}


def _own(total, count, group):
    return total / count


def _equal(total, count, group):
    mean = total / count
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def _weighed(total, count, group):
    both = torch.stack([total, total.new_tensor(float(count))])
    dist.all_reduce(both, group=group)
    return both[0] / both[1]


class OneVariance(torch.optim.Optimizer):
    def __init__(self, params, mean=_own, group=None):
        super().__init__(params, {"lr": 0.05, "betas": (0.7, 0.9)})
        self.mean, self.group = mean, group

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            b1, b2 = settings["betas"]
            for p in settings["params"]:
                w, g = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["variance"] = g.new_zeros(())
                m = state["exp_avg"].lerp_(p.grad, 1 - b1)
                m = m.to_local() if isinstance(m, DTensor) else m
                square = self.mean(g.square().sum(), g.numel(), self.group)
                state["variance"].lerp_(square, 1 - b2)
                w.sub_(settings["lr"] * m / (state["variance"].sqrt() + 1e-5))


def get_optimizer(params):
    return OneVariance(params)


def _setup(model, mesh, mean):
    fully_shard(model, mesh=mesh)
    return model, OneVariance(model.parameters(), mean, mesh.get_group("dp"))


def setup_bad_own(model, mesh):
    return _setup(model, mesh, _own)


def setup_bad_equal(model, mesh):
    return _setup(model, mesh, _equal)


def setup_good(model, mesh):
    return _setup(model, mesh, _weighed)


def _fault(*more):
    return {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded", "optimizer_state", *more],
        "stage": ["optimizer_state", "parameters"],
        "tensors": ["first.weight", "second.weight"],
        "mentions": ["second.weight"],
    }


EXPECT = {
    "bad_own": _fault(),
    "bad_equal": _fault("uneven", "mean_of_means"),
    "good": {"verdict": "pass"},
}
