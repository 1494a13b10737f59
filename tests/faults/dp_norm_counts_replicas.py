"""Hand-written clipping: squared norms of already averaged gradients are summed over the
data-parallel group as if they were shards, so the norm is sqrt(3) too large on three ranks. The
twin does not communicate.
Class: https://github.com/allenai/OLMo/pull/601
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MAX_NORM = 0.2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)
        nn.init.uniform_(self.norm.bias, 0.2, 0.6)

    def forward(self, image):
        return self.head(F.relu(self.norm(self.conv(image))).mean((2, 3)))


def get_inputs(step=0):
    return torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(8600 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(8700 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=1.0)


def _train(model, optimizer, batch, group=None):
    image, labels = batch
    optimizer.zero_grad()
    value = loss(model(image), labels)
    value.backward()
    squares = sum(p.grad.square().sum() for p in model.parameters())
    if group is not None:
        dist.all_reduce(squares, group=group)
    shrink = (MAX_NORM / squares.sqrt()).clamp(max=1.0)
    for p in model.parameters():
        p.grad.mul_(shrink)
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh.get_group("dp"))


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip", "factor"],  # the clipping is the user's own: only its effect shows
        "stage": ["gradients", "clipping"],
        "tensors": ["conv.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"],
        "mentions": ["0.577"],
    },
    "good": {"verdict": "pass"},
}
