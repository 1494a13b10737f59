"""Second moments are accumulated in gradient hooks, which run before the all-reduce: a rank keeps
the squares of its own samples' gradient. The twin accumulates after the reduction.
Class: https://github.com/radixark/miles/pull/2723 (a hook that sees another gradient than the step)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3)
        self.proj = nn.Linear(5, 6)

    def forward(self, x):
        return self.proj(torch.tanh(self.conv(x)).amax(-1))


def get_inputs(step=0):
    return _normal(12 + step, 8, 2, 7) * torch.linspace(0.3, 2.0, 8)[:, None, None]


def get_targets(step=0):
    return _normal(42 + step, 8, 6)


def loss(output, targets):
    return F.mse_loss(output, targets)


class HookedRms(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01, "alpha": 0.8})
        self.accumulated_by_hooks = False

    @torch.no_grad()
    def accumulate(self, p):
        alpha = self.param_groups[0]["alpha"]
        square = self.state[p].setdefault("square_avg", torch.zeros_like(p))
        square.mul_(alpha).addcmul_(p.grad, p.grad, value=1 - alpha)

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            for p in settings["params"]:
                if not self.accumulated_by_hooks:
                    self.accumulate(p)
                scale = self.state[p]["square_avg"].sqrt() + 1e-3
                p.addcdiv_(p.grad, scale, value=-settings["lr"])


def get_optimizer(params):
    return HookedRms(params)


def setup_bad(model, mesh):
    optimizer = HookedRms(model.parameters())
    optimizer.accumulated_by_hooks = True
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer.accumulate)
    return model, optimizer


def setup_good(model, mesh):
    return model, HookedRms(model.parameters())


def step_bad(model, optimizer, batch, mesh):
    x, y = batch
    optimizer.zero_grad()
    value = F.mse_loss(model(x), y)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.div_(mesh.size()), group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_state", "no_sync", "missing_reduction"],
        "stage": "optimizer_state",
        "tensors": ["conv.weight", "proj.weight"],
        "mentions": ["square_avg", "proj.weight"],
    },
    "good": {"verdict": "pass"},
}
