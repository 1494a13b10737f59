"""The parallel trainer aggregates per sequence first (mean over its tokens, then over sequences);
one device takes the mean over all tokens. Equal only for equal lengths. The twin sums tokens and
divides once by their global number.
Class: https://niyunsheng.github.io/loss-reduction-in-distributed-training
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

LENGTH = 7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 9)
        self.norm = nn.LayerNorm(9)
        self.score = nn.Linear(9, 1)

    def forward(self, x):
        return self.score(self.norm(torch.relu(self.mix(x)))).squeeze(-1)


def get_inputs(step=0):
    return {"x": torch.randn(8, LENGTH, 5, generator=torch.Generator().manual_seed(4700 + step))}


def get_targets(step=0):
    g = torch.Generator().manual_seed(4800 + step)
    lengths = torch.tensor([1, 7, 2, 6, 3, 1, 7, 4]).roll(step)
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    return {"wanted": torch.randn(8, LENGTH, generator=g), "mask": mask}


def loss(output, targets):
    return (_errors(output, targets)).sum() / targets["mask"].sum()


def _errors(output, targets):
    return (output - targets["wanted"]).square() * targets["mask"]


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.8, nesterov=True)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = (_errors(model(batch["x"]), batch).sum(1) / batch["mask"].sum(1)).mean()
    value.backward()
    optimizer.step()
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    tokens = batch["mask"].sum()
    dist.all_reduce(tokens, group=mesh.get_group("dp"))
    value = _errors(model(batch["x"]), batch).sum() * mesh.size() / tokens
    value.backward()
    optimizer.step()
    return value.detach()  # the mean over the ranks is the global token mean


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["mix.weight", "mix.bias", "norm.weight", "score.weight", "score.bias"],
        "mentions": ["score.bias"],
    },
    "good": {"verdict": "pass"},
}
