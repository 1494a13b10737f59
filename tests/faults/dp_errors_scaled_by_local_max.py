"""Hard-example weighting: each error is weighed by its share of the largest error in the batch;
data parallel takes the largest of the rank. The twin takes the maximum over all ranks.
Class: https://github.com/pytorch/ao/pull/590 (a scale that must come from the global maximum)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 5, 3, padding=1, bias=False)
        self.norm = nn.InstanceNorm1d(5, affine=True)
        self.out = nn.Conv1d(5, 1, 1)
        nn.init.uniform_(self.norm.bias, 0.1, 0.4)

    def forward(self, signal):
        return self.out(F.celu(self.norm(self.conv(signal))))


def get_inputs(step=0):
    return torch.randn(8, 1, 7, generator=torch.Generator().manual_seed(11300 + step))


def get_targets(step=0):
    wanted = torch.randn(8, 1, 7, generator=torch.Generator().manual_seed(11400 + step))
    return wanted * torch.linspace(0.5, 3.0, 8)[:, None, None]  # later samples are harder


def _weighted(output, wanted, largest_of):
    errors = (output - wanted).abs().mean((1, 2))
    return (errors * errors.detach() / largest_of(errors.detach().max())).mean()


def loss(output, targets):
    return _weighted(output, targets, lambda largest: largest)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_good(model, optimizer, batch, mesh):
    def over_ranks(largest):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group("dp"))
        return largest

    optimizer.zero_grad()
    value = _weighted(model(batch[0]), batch[1], over_ranks)
    value.backward()
    optimizer.step()
    return value.detach()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["cross_sample"],
        "stage": "loss",
        "tensors": ["conv.weight", "norm.weight", "out.weight", "out.bias"],
        "mentions": ["dp"],
    },
    "good": {"verdict": "pass"},
}
