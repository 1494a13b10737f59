"""Sharded AdamW: every rank decays whole tensors before the update, then the optimizer decays its
rows again - these are what is gathered. The twin leaves decay to the optimizer.
Class: https://github.com/NVIDIA/Megatron-LM/issues/5974 (equal gradients, another step)
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
        self.a = nn.Linear(6, 9)
        self.b = nn.Linear(9, 3)

    def forward(self, x, y):
        return F.mse_loss(self.b(torch.tanh(self.a(x))), y)


def get_inputs(step=0):
    return {"x": _normal(46 + step, 6, 6), "y": _normal(47 + step, 6, 3)}


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.25)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    rank = mesh.get_local_rank("dp")
    rows = [nn.Parameter(p.detach().chunk(mesh.size())[rank]) for p in model.parameters()]
    return model, get_optimizer(rows)  # rows are views of the model's tensors


setup_good = setup_bad


def _train(model, optimizer, batch, mesh, decay_first):
    size, rank, group = mesh.size(), mesh.get_local_rank("dp"), mesh.get_group("dp")
    settings = optimizer.param_groups[0]
    model.zero_grad()
    value = model(**batch)
    value.backward()
    for p, rows in zip(model.parameters(), settings["params"], strict=True):
        dist.all_reduce(p.grad.div_(size), group=group)
        rows.grad = p.grad.chunk(size)[rank].clone()
        if decay_first:
            p.data.mul_(1 - settings["lr"] * settings["weight_decay"])
    optimizer.step()
    for p in model.parameters():
        for owner, rows in enumerate(p.data.chunk(size)):
            dist.broadcast(rows, group=group, group_src=owner)
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs", "optimizer_state", "optimizer_sharded"],
        "stage": "parameters",
        "tensors": ["a.weight", "b.weight"],
        "mentions": ["a.weight", "b.weight"],
    },
    "good": {"verdict": "pass"},
}
