"""Hand-written pipeline; seven samples make micro-batches of 3, 3 and 1, and the mean of their
means is trained: the lone sample counts three times. The twin weighs each micro-batch by its size.
Class: https://github.com/OpenNMT/OpenNMT-py/issues/2209,
https://github.com/huggingface/transformers/pull/35438
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)])

    def forward(self, x):
        for number, stage in enumerate(self.stages):
            x = stage(x if number == 0 else torch.sigmoid(x))
        return x


def get_inputs(step=0):
    return _noise(3500 + step, 7, 4)


def get_targets(step=0):
    return _noise(3530 + step, 7, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.6)


def mesh_bad():
    return {"pp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    for number in range(3):
        if number != mesh.get_local_rank("pp"):
            model.stages[number] = None
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, weights):
    rank = mesh.get_local_rank("pp")
    stage = model.stages[rank]
    optimizer.zero_grad()
    micro = list(zip(batch[0].split(3), batch[1].split(3), strict=True))
    inputs, outputs, total = [], [], torch.zeros(())
    for x, _ in micro:
        if rank > 0:
            x = torch.empty(x.shape[0], stage.in_features)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        inputs.append(x)
        outputs.append(stage(x if rank == 0 else torch.sigmoid(x)))
        if rank < 2:
            dist.send(outputs[-1].detach(), rank + 1)
    for (_, y), x, out, weight in zip(micro, inputs, outputs, weights, strict=True):
        if rank < 2:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        else:
            value = loss(out, y) * weight
            value.backward()
            total += value.detach()
        if rank > 0:
            dist.send(x.grad, rank - 1)
    optimizer.step()
    return total if rank == 2 else None


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, (1 / 3, 1 / 3, 1 / 3))


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, (3 / 7, 3 / 7, 1 / 7))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means", "uneven"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss"],
    },
    "good": {"verdict": "pass"},
}
