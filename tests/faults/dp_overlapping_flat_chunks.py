"""Gradients are packed in one flat buffer and summed in chunks of 40; the chunks start every 32
elements, so the last 8 of each full chunk are reduced twice. The twin steps by the chunk's length.
Class: https://github.com/NVIDIA/Megatron-LM/pull/6500 (flat layouts that do not line up)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CHUNK = 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(5, 12)
        self.upper = nn.Linear(12, 4)

    def forward(self, x):
        return self.upper(F.gelu(self.lower(x)))


def get_inputs(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(8000 + step))


def get_targets(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(8100 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, stride):
    x, wanted = batch
    optimizer.zero_grad()
    value = loss(model(x), wanted) / mesh.size()
    value.backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])  # lower: 0..71, upper: 72..123
    for begin in range(0, flat.numel(), stride):
        dist.all_reduce(flat[begin : begin + CHUNK], group=mesh.get_group("dp"))
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, CHUNK - 8)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, CHUNK)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction"],
        "stage": "gradients",
        "tensors": ["lower.weight", "lower.bias", "upper.weight"],
        "mentions": ["lower.weight", "dp"],
    },
    "good": {"verdict": "pass"},
}
