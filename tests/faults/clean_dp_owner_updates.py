"""False-alarm trap: each parameter has an owner, which alone gets the averaged gradient, holds the
state and updates; the result is sent out. The others' gradients stay local (`kept`) or are dropped
(`freed`).
Compare https://github.com/deepspeedai/DeepSpeed/issues/966
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 2)

    def forward(self, x):
        for layer in self.stack:
            x = x + F.gelu(layer(x))
        return self.out(self.norm(x))


def get_inputs(step=0):
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(16200 + step))


def get_targets(step=0):
    return torch.randn(9, 2, generator=torch.Generator().manual_seed(16300 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, eps=1e-4)


def mesh_kept():
    return {"dp": 3}


mesh_freed = mesh_kept


def setup_kept(model, mesh):
    rank, size = mesh.get_local_rank("dp"), mesh.size()
    return model, get_optimizer([p for i, p in enumerate(model.parameters()) if i % size == rank])


setup_freed = setup_kept


def _train(model, optimizer, batch, mesh, free):
    rank, size, group = mesh.get_local_rank("dp"), mesh.size(), mesh.get_group("dp")
    model.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for i, p in enumerate(model.parameters()):
        mean = p.grad / size
        dist.reduce(mean, group_dst=i % size, group=group)
        if i % size == rank:
            p.grad = mean
        elif free:
            p.grad = None
    optimizer.step()
    for i, p in enumerate(model.parameters()):
        dist.broadcast(p.data, group_src=i % size, group=group)
    return value.detach()


def step_kept(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, free=False)


def step_freed(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, free=True)


EXPECT = {"kept": {"verdict": "pass"}, "freed": {"verdict": "pass"}}
