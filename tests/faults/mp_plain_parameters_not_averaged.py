"""Tensor-parallel layers inside a dp x tp mesh; the loop that averages gradients over dp visits
DTensor parameters only and passes by the plain embedding, norm and head.
Class: https://github.com/hao-ai-lab/FastVideo/pull/1666 (parameters outside the wrapper, replicated
in name only)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.back(F.relu(self.wide(self.norm(x)))))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(4400 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(4430 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, foreach=False)


def mesh_bad():
    return {"dp": 2, "tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, every):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    group = mesh.get_group("dp")
    for p in model.parameters():
        if isinstance(p, DTensor) or every:
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, group=group)
            grad.div_(group.size())
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, every=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, every=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync", "missing_reduction"],
        "stage": "gradients",
        "tensors": ["embed.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"],
        "mentions": ["head.weight", "dp"],
    },
    "good": {"verdict": "pass"},
}
