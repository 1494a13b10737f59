"""A classifier head is reset for a new task after the wrapper has made the replicas equal, from a
random state that the last rank has already advanced (it drew a preview). `good` resets before DDP,
which broadcasts rank 0's. Class: https://github.com/allenai/OLMo-core/pull/307
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(2, 4, 2)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.head.weight.copy_(_head_start(7))

    def forward(self, image):
        return self.head(torch.celu(self.body(image)).mean((2, 3)))


def _head_start(seed):
    return 0.4 * _normal(seed, 3, 4)


def get_inputs(step=0):
    return _normal(155 + step, 8, 2, 4, 4)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(105 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets, label_smoothing=0.05)


def get_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.05)


def mesh_bad():
    return {"dp": 4}


mesh_good = mesh_bad


def _reset(model, mesh):
    previews = 1 if mesh.get_local_rank("dp") == mesh.size() - 1 else 0
    with torch.no_grad():
        model.head.weight.copy_(_head_start(7 + previews))


def parallelize_bad(model, mesh):
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    _reset(model, mesh)
    return wrapped


def parallelize_good(model, mesh):
    _reset(model, mesh)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["initial"],
        "stage": "initial_state",
        "tensors": ["head.weight"],
        "mentions": ["head.weight", "rank 3"],
    },
    "good": {"verdict": "pass"},
}
