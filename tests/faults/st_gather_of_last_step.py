"""Sharded update, then gather - but the send buffer was filled before the update, "to overlap the
copy": every rank trains with the weights of the step before. The twin fills it after the update.
Class: https://github.com/deepspeedai/DeepSpeed/issues/5294 (overlap that reads too early)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _uniform(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(16, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x, y):
        h = torch.sigmoid(self.conv(x)).flatten(1)
        return F.mse_loss(self.out(torch.tanh(self.hidden(h))), y)


def get_inputs(step=0):
    return {"x": 4 * _uniform(7 + step, 4, 1, 4, 4), "y": _uniform(77 + step, 4, 4)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def setup_bad(model, mesh):
    rank, size = mesh.get_local_rank("dp"), mesh.size()
    shards = [nn.Parameter(p.detach().chunk(size)[rank].clone()) for p in model.parameters()]
    return model, get_optimizer(shards)


setup_good = setup_bad


def _train(model, optimizer, batch, mesh, fill_early):
    rank, size, group = mesh.get_local_rank("dp"), mesh.size(), mesh.get_group("dp")
    model.zero_grad()
    value = model(**batch)
    value.backward()
    shards = optimizer.param_groups[0]["params"]
    for p, shard in zip(model.parameters(), shards, strict=True):
        dist.all_reduce(p.grad.div_(size), group=group)
        shard.grad = p.grad.chunk(size)[rank].clone()
    early = [shard.detach().clone() for shard in shards]
    optimizer.step()
    late = [shard.detach().clone() for shard in shards]
    with torch.no_grad():
        for p, send in zip(model.parameters(), early if fill_early else late, strict=True):
            dist.all_gather(list(p.data.chunk(size)), send, group=group)
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale"],
        "stage": "parameters",
        "tensors": ["conv.weight", "hidden.weight", "out.weight"],
        "mentions": ["hidden.weight"],
    },
    "good": {"verdict": "pass"},
}
