"""Communication hooks that scale wrongly on four ranks: `sum` forgets the division that a hook
replaces, `root` divides by sqrt(W), `twice` divides before and after the reduction. The twins
divide once.
Class: https://github.com/deepspeedai/DeepSpeed/pull/6546
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Bilinear(4, 3, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, left, right):
        return self.out(torch.tanh(self.squeeze(left, right)))


def get_inputs(step=0):
    g = torch.Generator().manual_seed(5700 + step)
    return {"left": torch.randn(8, 4, generator=g), "right": torch.randn(8, 3, generator=g)}


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(5800 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets, label_smoothing=0.1)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


def mesh_bad_sum():
    return {"dp": 4}


def _wrapped(model, mesh, before, after):
    group = mesh.get_group("dp")

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(before), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(after))

    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(None, hook)
    return ddp


def parallelize_bad_sum(model, mesh):
    return _wrapped(model, mesh, 1, 1)


def parallelize_bad_root(model, mesh):
    return _wrapped(model, mesh, math.sqrt(mesh.size()), 1)


def parallelize_bad_twice(model, mesh):
    return _wrapped(model, mesh, mesh.size(), mesh.size())


def parallelize_good_sum(model, mesh):
    return _wrapped(model, mesh, 1, mesh.size())


def parallelize_good_root(model, mesh):
    return _wrapped(model, mesh, math.sqrt(mesh.size()), math.sqrt(mesh.size()))


def parallelize_good_twice(model, mesh):
    return _wrapped(model, mesh, mesh.size(), 1)


mesh_bad_root = mesh_bad_twice = mesh_good_sum = mesh_good_root = mesh_good_twice = mesh_bad_sum


def _fault(factor):
    return {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["squeeze.weight", "squeeze.bias", "out.weight", "out.bias"],
        "mentions": [factor, "dp"],
    }


EXPECT = {
    "bad_sum": _fault("4"),
    "good_sum": {"verdict": "pass"},
    "bad_root": _fault("2"),
    "good_root": {"verdict": "pass"},
    "bad_twice": _fault("0.25"),
    "good_twice": {"verdict": "pass"},
}
