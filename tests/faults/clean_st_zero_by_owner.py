"""False-alarm trap: ZeRO by hand reduces a gradient to its owner only. On the other ranks it stays
the local part (`kept`), is dropped (`dropped`) or zeroed (`zeroed`); the weights are right.
Compare https://github.com/NVIDIA/Megatron-LM/issues/1446 (a gradient read before its last step)
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
        self.stem = nn.Conv1d(2, 6, 3)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x, y):
        h = torch.tanh(self.stem(x)).mean(-1)
        return F.mse_loss(self.head(h + F.silu(self.hidden(h))), y)


def get_inputs(step=0):
    return {"x": _normal(81 + step, 6, 2, 6), "y": _normal(181 + step, 6, 3)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)


def mesh_kept():
    return {"dp": 3}


mesh_dropped = mesh_zeroed = mesh_kept


def setup_kept(model, mesh):
    owned = list(model.parameters())[mesh.get_local_rank("dp") :: mesh.size()]
    return model, get_optimizer(owned)


setup_dropped = setup_zeroed = setup_kept


def _train(model, optimizer, batch, mesh, foreign):
    size, rank, group = mesh.size(), mesh.get_local_rank("dp"), mesh.get_group("dp")
    model.zero_grad()
    value = model(**batch)
    value.backward()
    for index, p in enumerate(model.parameters()):
        owner = index % size
        mean = p.grad / size
        dist.reduce(mean, group=group, group_dst=owner)
        p.grad = mean if owner == rank else foreign(p.grad)
    optimizer.step()
    for index, p in enumerate(model.parameters()):
        dist.broadcast(p.detach(), group=group, group_src=index % size)
    return value.detach()


def step_kept(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, lambda grad: grad)


def step_dropped(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, lambda grad: None)


def step_zeroed(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, torch.zeros_like)


EXPECT = {name: {"verdict": "pass"} for name in ("kept", "dropped", "zeroed")}
