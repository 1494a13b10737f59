"""Factored second moments (an average a row, another a column) on row shards: the column average
runs over 3 of 10 rows, 1 on the last of four ranks. The twin sums squares and counts over all.
Class: https://github.com/facebookresearch/fairscale/issues/767 (Adafactor on flattened shards)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _uniform(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(7, 10)
        self.back = nn.Linear(10, 10)
        self.out = nn.Linear(10, 10)

    def forward(self, x, y):
        h = torch.tanh(self.back(torch.tanh(self.wide(x))))
        return (self.out(h) - y).abs().pow(1.5).mean()


def get_inputs(step=0):
    return {"x": 3 * _uniform(5 + step, 8, 7) - 1, "y": _uniform(55 + step, 8, 10)}


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Factored(torch.optim.Optimizer):
    def __init__(self, params, group=None):
        super().__init__(params, {"lr": 0.02, "beta": 0.6})
        self.group = group

    def _mean_of_rows(self, square):
        total, count = square.sum(0), square.new_tensor(float(square.shape[0]))
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
            dist.all_reduce(count, group=self.group)
        return total / count.clamp_min(1)

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            beta = settings["beta"]
            for p in settings["params"]:
                w, g, state = _local(p), _local(p.grad), self.state[p]
                square = g.square() + 1e-12
                if p.dim() == 1:
                    state["square"] = square.lerp(state.get("square", square), beta)
                    scale = state["square"]
                else:
                    row, col = square.mean(1), self._mean_of_rows(square)
                    state["row"] = row.lerp(state.get("row", row), beta)
                    state["col"] = col.lerp(state.get("col", col), beta)
                    scale = state["row"][:, None] * state["col"] / state["col"].mean()
                w.sub_(settings["lr"] * g / (scale.sqrt() + 1e-3))


def get_optimizer(params):
    return Factored(params)


def mesh_bad():
    return {"dp": 4}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, Factored(model.parameters())


def setup_good(model, mesh):
    fully_shard(model, mesh=mesh)
    return model, Factored(model.parameters(), mesh.get_group("dp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_sharded", "optimizer_state"],
        "stage": ["optimizer_state", "parameters"],
        "tensors": ["wide.weight", "back.weight", "out.weight"],
        "mentions": ["back.weight", "Factored"],
    },
    "good": {"verdict": "pass"},
}
