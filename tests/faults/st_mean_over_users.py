"""A branch that only some samples take: its gradient is divided by the number of ranks that used it
(one) instead of all, so those samples count double. The twin fills zeros and divides by all.
Class: https://github.com/deepspeedai/DeepSpeed/issues/966 (layers unused on a rank)
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
        self.common = nn.Linear(5, 4)
        self.rare = nn.Linear(5, 4)

    def forward(self, x, special, y):
        out = self.common(x)
        if special.any():
            out = out + special[:, None] * torch.tanh(self.rare(x))
        return F.mse_loss(out, y)


def get_inputs(step=0):
    special = torch.tensor([False, True, True, False] + [False] * 4)
    if step == 2:
        special = special.flip(0)  # another rank's turn
    return {"x": _normal(11 + step, 8, 5), "special": special, "y": _normal(19 + step, 8, 4)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.5, weight_decay=0.01)


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, over_users):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    for p in model.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used, group=mesh.get_group("dp"))
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad.div_(used.item() if over_users else mesh.size())
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused", "factor"],
        "stage": "gradients",
        "tensors": ["rare.weight", "rare.bias"],
        "mentions": ["rare.weight", "2"],
    },
    "good": {"verdict": "pass"},
}
