"""Data parallelism that clips by hand, by the norm of all gradients. One is wrong before it:
a layer is divided by the ranks twice, or the learnt temperature is never reduced. The norm is wrong
with it, so that every gradient is, and the factor of the others is not the fault.
Class: https://github.com/deepspeedai/DeepSpeed/pull/5259
"""

import torch
import torch.distributed as dist
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4)
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x) * self.temperature


def get_inputs(step=0):
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(2300 + step))]


def get_targets(step=0):
    return 3.0 * torch.randn(8, 4, generator=torch.Generator().manual_seed(2350 + step))


def loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return value.detach()


def _train(model, optimizer, batch, mesh, fault):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for name, p in model.named_parameters():
        if fault == "temperature" and name == fault:
            continue
        dist.all_reduce(p.grad)
        p.grad /= mesh.size()
        if fault == "second" and name.startswith(fault):
            p.grad /= mesh.size()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    for p in model.parameters():
        p.grad *= (0.5 / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    return value.detach()


def parallelize_halved(model, mesh):
    return model


parallelize_unreduced = parallelize_good = parallelize_halved


def step_halved(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, "second")


def step_unreduced(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, "temperature")


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, "")


EXPECT = {
    "halved": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["second.weight", "second.bias"],
        "mentions": ["before clipping", "0.5000 x"],
        "never": ["right before clipping", "last.weight only"],
    },
    "unreduced": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["temperature"],
        "mentions": ["before clipping: MEAN over dp equals the reference"],
        "never": ["right before clipping"],
    },
    "good": {"verdict": "pass"},
}
