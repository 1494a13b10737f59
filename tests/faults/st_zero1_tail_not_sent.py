"""Hand-written ZeRO-1 over three ranks: owners broadcast in rounds of three parameters and the loop
stops after the last full round, so the eighth and seventh tensor move on their owner only.
Class: https://github.com/deepspeedai/DeepSpeed/issues/966 (ZeRO stages that disagree)
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
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.norm(torch.relu(self.b(torch.relu(self.a(x))))))


def get_inputs(step=0):
    return _normal(900 + step, 6, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(950 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    owned = list(model.parameters())[mesh.get_local_rank("dp") :: mesh.size()]
    return model, get_optimizer(owned)


setup_good = setup_bad


def _train(model, optimizer, batch, mesh, sent):
    x, y = batch
    model.zero_grad()
    value = loss(model(x), y)
    value.backward()
    params = list(model.parameters())
    for p in params:
        dist.all_reduce(p.grad.div_(mesh.size()), group=mesh.get_group("dp"))
    optimizer.step()
    for index in range(sent(len(params))):
        owner = index % mesh.size()
        dist.broadcast(params[index].detach(), group=mesh.get_group("dp"), group_src=owner)
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, lambda n: n // mesh.size() * mesh.size())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, lambda n: n)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["stale", "uneven"],
        "stage": "parameters",
        "tensors": ["c.weight", "c.bias"],
        "mentions": ["c.weight", "c.bias"],
    },
    "good": {"verdict": "pass"},
}
