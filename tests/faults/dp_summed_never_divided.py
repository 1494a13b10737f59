"""Hand-written data parallel: local means, gradients summed over four ranks, never divided. AdamW
hides the factor in the loss curve. The twin divides by the number of ranks.
Class: https://github.com/meta-pytorch/torchtune/issues/2641
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.second = nn.Linear(9, 9)
        self.last = nn.Linear(9, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h + F.softplus(self.second(h))).squeeze(-1)


def get_inputs(step=0):
    return [torch.randn(12, 7, generator=torch.Generator().manual_seed(5500 + step))]


def get_targets(step=0):
    return torch.randn(12, generator=torch.Generator().manual_seed(5600 + step))


def loss(output, targets):
    return F.huber_loss(output, targets, delta=0.7)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def mesh_bad():
    return {"dp": 4}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, divide_by):
    x, wanted = batch
    optimizer.zero_grad(set_to_none=False)
    value = loss(model(x), wanted)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad.div_(divide_by)
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, mesh.size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["first.weight", "second.weight", "last.weight", "last.bias"],
        "mentions": ["4", "dp"],
    },
    "good": {"verdict": "pass"},
}
