"""Gradual unfreezing: the body starts to train in the second step, but the list of gradients to
reduce was made while it was frozen. The twin asks again in every step.
Class: https://github.com/hao-ai-lab/FastVideo/pull/1666
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), nn.Softsign(), nn.Linear(7, 5))
        self.body.requires_grad_(False)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.body(x))


def get_inputs(step=0):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(13000 + step))
    return {"x": x}


def get_targets(step=0):
    wanted = torch.randn(8, 2, generator=torch.Generator().manual_seed(13100 + step))
    return {"wanted": wanted, "unfrozen": torch.tensor(step > 0)}


def input_sharding():
    return {"targets.unfrozen": {"dp": None}}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def _train(model, optimizer, batch, reduce):
    model.body.requires_grad_(bool(batch["unfrozen"]))
    optimizer.zero_grad()
    value = F.mse_loss(model(batch["x"]), batch["wanted"])
    value.backward()
    reduce()
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, lambda: None)


def parallelize_bad(model, mesh):
    model.listed = [p for p in model.parameters() if p.requires_grad]
    return model


parallelize_good = parallelize_bad


def _average(parameters, mesh):
    for p in parameters:
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda: _average(model.listed, mesh))


def step_good(model, optimizer, batch, mesh):
    def reduce():
        _average([p for p in model.parameters() if p.requires_grad], mesh)

    return _train(model, optimizer, batch, reduce)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused", "no_sync", "missing_reduction"],
        "stage": "gradients",
        "tensors": ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"],
        "mentions": ["body.0.weight", "dp"],
    },
    "good": {"verdict": "pass"},
}
