"""Experts picked by task: an expert's gradient is divided by the number of ranks that used it, not
by all ranks, so an expert only one of three ranks used learns three times too fast. The twin
divides everything by three.
Class: https://github.com/laekov/fastmoe/issues/106
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x, task):
        h = torch.tanh(self.shared(x))
        mixed = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = task == i
            if rows.any():
                mixed = mixed + rows[:, None] * F.gelu(expert(h))
        return self.out(h + mixed)


def get_inputs(step=0):
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(6100 + step))
    # expert 0 is used on every rank, expert 1 on rank 1 only, expert 2 on ranks 1 and 2
    return {"x": x, "task": torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 0])}


def get_targets(step=0):
    return torch.randn(9, 2, generator=torch.Generator().manual_seed(6200 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, over_users):
    group = mesh.get_group("dp")
    optimizer.zero_grad()
    value = loss(model(batch["x"], batch["task"]), batch["targets"])
    value.backward()
    for p in model.parameters():
        users = torch.tensor(0.0 if p.grad is None else 1.0)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=group)
        dist.all_reduce(users, group=group)
        p.grad /= users if over_users else mesh.size()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, over_users=True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, over_users=False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["experts.1.weight", "experts.1.bias", "experts.2.weight", "experts.2.bias"],
        "mentions": ["experts.1.weight", "3"],
    },
    "good": {"verdict": "pass"},
}
