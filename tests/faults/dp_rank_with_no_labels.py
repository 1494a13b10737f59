"""Segmentation where one rank's images carry no label at all. `clamped` divides by max(count, 1)
and still averages over all three ranks; `nan` divides zero by zero there: its loss is NaN, its
gradient zero. The twins divide by the count over all ranks.
Class: https://github.com/NVIDIA-NeMo/Speech/issues/14488
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CLASSES, UNLABELLED = 4, -1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.classify = nn.Conv2d(6, CLASSES, 1)
        nn.init.uniform_(self.norm.bias, 0.1, 0.5)

    def forward(self, image):
        return self.classify(F.silu(self.norm(self.stem(image))))


def get_inputs(step=0):
    return torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(4300 + step))


def get_targets(step=0):
    g = torch.Generator().manual_seed(4400 + step)
    labels = torch.randint(0, CLASSES, (6, 5, 5), generator=g)
    labels[torch.rand(6, 5, 5, generator=g) < 0.4] = UNLABELLED
    empty = (2 + step) % 3  # rank 2 at step 0
    labels[2 * empty : 2 * empty + 2] = UNLABELLED
    return labels


def loss(output, targets):
    return F.cross_entropy(output, targets, ignore_index=UNLABELLED)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.6)


def mesh_bad_clamped():
    return {"dp": 3}


def parallelize_bad_clamped(model, mesh):
    return model


mesh_good_clamped = mesh_bad_nan = mesh_good_nan = mesh_bad_clamped
parallelize_good_clamped = parallelize_bad_nan = parallelize_good_nan = parallelize_bad_clamped


def _finish(value, model, optimizer, mesh, divide_by):
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= divide_by
    optimizer.step()
    return value.detach()


def _summed(model, optimizer, batch):
    image, labels = batch
    optimizer.zero_grad()
    total = F.cross_entropy(model(image), labels, ignore_index=UNLABELLED, reduction="sum")
    return total, (labels != UNLABELLED).sum()


def step_bad_clamped(model, optimizer, batch, mesh):
    total, count = _summed(model, optimizer, batch)
    return _finish(total / count.clamp(min=1), model, optimizer, mesh, mesh.size())


def step_bad_nan(model, optimizer, batch, mesh):
    total, count = _summed(model, optimizer, batch)
    return _finish(total / count, model, optimizer, mesh, mesh.size())


def step_good_clamped(model, optimizer, batch, mesh):
    total, count = _summed(model, optimizer, batch)
    dist.all_reduce(count, group=mesh.get_group("dp"))
    return _finish(total / count, model, optimizer, mesh, 1)


step_good_nan = step_good_clamped

FAULT = {
    "verdict": "mismatch",
    "kind": ["mean_of_means"],
    "stage": "loss",
    "tensors": ["stem.weight", "norm.weight", "classify.weight", "classify.bias"],
    "mentions": ["rank 2"],
}
EXPECT = {
    "bad_clamped": FAULT,
    "good_clamped": {"verdict": "pass"},
    "bad_nan": FAULT,
    "good_nan": {"verdict": "pass"},
}
