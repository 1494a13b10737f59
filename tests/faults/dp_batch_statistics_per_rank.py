"""A batch-normalisation layer in hand-written data parallel. `local` normalises by the rank's own
statistics; `spread` averages means and variances over ranks, but drops the variance between the
ranks' means. The twins sum moments over ranks.
Class: https://github.com/huggingface/pytorch-image-models/issues/110 and https://github.com/pytorch/pytorch/issues/22192
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    """Normalises over batch and places; `averaged` maps a local mean to the one to use."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.rand(width) - 0.3)
        self.register_buffer("running_mean", torch.zeros(width))
        self.averaged = lambda value: value
        self.within = False

    def forward(self, x):
        mean = self.averaged(x.mean((0, 2, 3)))
        center = x.mean((0, 2, 3)) if self.within else mean
        var = self.averaged((x - center[:, None, None]).square().mean((0, 2, 3)))
        self.running_mean.lerp_(mean.detach(), 0.1)
        scale = self.weight * (var + 1e-5).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = Norm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, image):
        return self.head(F.relu(self.norm(self.conv(image))).mean((2, 3)))


def get_inputs(step=0):
    image = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(11500 + step))
    return image + torch.linspace(-2, 2, 8)[:, None, None, None]  # brightness differs by rank


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(11600 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad_local(model, mesh):
    return model


def parallelize_good_local(model, mesh):
    group = mesh.get_group("dp")
    model.norm.averaged = lambda value: dist_nn.all_reduce(value, group=group) / mesh.size()
    return model


def parallelize_bad_spread(model, mesh):
    model.norm.within = True
    return parallelize_good_local(model, mesh)


parallelize_good_spread = parallelize_good_local


def step_bad_local(model, optimizer, batch, mesh):
    image, labels = batch
    optimizer.zero_grad()
    value = loss(model(image), labels)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


step_good_local = step_bad_spread = step_good_spread = step_bad_local

FAULT = {
    "verdict": "mismatch",
    "kind": ["batch_statistics"],
    "stage": "module_outputs",
    "tensors": ["conv.weight", "norm.weight", "norm.bias", "head.weight"],
    "mentions": ["norm"],
}
EXPECT = {
    "bad_local": FAULT,
    "good_local": {"verdict": "pass"},
    "bad_spread": FAULT,
    "good_spread": {"verdict": "pass"},
}
