"""A forward hook, left from a trial, bends the logits of a head that is tied to the embedding. No
known cause fits, and a parameter under two names and one without dims are tried like others.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.tokens(ids) * self.scale))


def get_inputs(step=0):
    return [torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(5300 + step))]


def get_targets(step=0):
    return torch.randint(0, 11, (8, 4), generator=torch.Generator().manual_seed(5350 + step))


def loss(output, targets):
    return F.cross_entropy(output.mT, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def parallelize_good(model, mesh):
    model.head.register_forward_hook(lambda _, args, output: output)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_bad(model, mesh):
    model.head.register_forward_hook(lambda _, args, output: output + 0.01 * output.square())
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {
    "good": {"verdict": "pass"},
    "bad": {
        "verdict": "mismatch",
        "stage": "module_outputs",
        "kind": ["unexplained"],
        "tensors": ["head", "tokens.weight", "scale"],
        "mentions": ["head", "tokens.weight"],
    },
}
