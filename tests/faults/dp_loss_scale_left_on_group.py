"""Loss scaling: the loss is multiplied by 8 against underflow and the scale is divided out of the
first parameter group only; norms and biases in the second group train with 8 times their gradient.
The twin unscales every group.
Class: https://github.com/NVlabs/stylegan3/issues/184
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SCALE = 8.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        nn.init.uniform_(self.norm.bias, -0.4, 0.4)

    def forward(self, x):
        return self.head(F.silu(self.norm(self.body(x))))


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(6300 + step))


def get_targets(step=0):
    return torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(6400 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.05)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, groups):
    x, labels = batch
    optimizer.zero_grad()
    value = loss(model(x), labels)
    (value * SCALE).backward()
    for group in groups:
        for p in group["params"]:
            p.grad /= SCALE
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, optimizer.param_groups[:1])


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, optimizer.param_groups)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["body.bias", "norm.weight", "norm.bias", "head.bias"],
        "mentions": ["8", "norm.weight"],
    },
    "good": {"verdict": "pass"},
}
