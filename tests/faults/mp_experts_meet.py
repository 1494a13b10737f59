"""Two experts, one on each rank, both called by every token. Their gradients are all-reduced over
ep like the dense ones, so two different experts meet in one sum. The twin leaves experts to
their owner.
Class: https://github.com/laekov/fastmoe/issues/106 (gradients of experts)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def mixed(self, h, weights):
        parts = [F.gelu(e(h)) * weights[:, i : i + 1] for i, e in enumerate(self.experts) if e]
        return sum(parts)

    def forward(self, x):
        h = self.inp(x)
        return self.out(h + self.mixed(h, self.gate(h).softmax(-1)))


def get_inputs(step=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(9400 + step))


def get_targets(step=0):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(9430 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def mesh_good():
    return {"ep": 2}


mesh_bad = mesh_good


def parallelize_good(model, mesh):
    model.experts[1 - mesh.get_local_rank()] = None
    whole = model.mixed
    model.mixed = lambda h, weights: all_reduce(whole(h, weights))
    return model


parallelize_bad = parallelize_good


def _train(model, optimizer, batch, mesh, owned):
    optimizer.zero_grad()
    # The all-reduce hands back the sum of both ranks' gradients: all count twice behind it.
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for name, p in model.named_parameters():
        if not name.startswith(owned):
            dist.all_reduce(p.grad)
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, "experts")


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, "nothing")


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "gradients",
        "tensors": ["experts.1.weight"],
        "mentions": ["different parameters", "ep"],
    },
    "good": {"verdict": "pass"},
}
