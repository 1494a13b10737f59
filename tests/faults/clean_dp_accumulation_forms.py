"""False-alarm trap: four right ways to accumulate - each loss divided, gradients divided at the
end, sums divided by the global count, a reduction in every micro-batch.
Compare https://github.com/NVIDIA/Megatron-LM/issues/1162
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3)
        self.norm = nn.GroupNorm(1, 5)
        self.head = nn.Linear(5, 3)
        nn.init.uniform_(self.norm.bias, 0.1, 0.5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean(-1))


def get_inputs(step=0):
    return torch.randn(8, 2, 7, generator=torch.Generator().manual_seed(15200 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(15300 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


def parallelize_loss_divided(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_grad_divided = parallelize_by_count = parallelize_every_time = parallelize_loss_divided


def _accumulate(model, optimizer, batch, divide_by, reduction="mean", every_time=False):
    optimizer.zero_grad()
    total = 0.0
    micro = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    for i, (x, labels) in enumerate(micro, start=1):
        with nullcontext() if every_time or i == MICRO_BATCHES else model.no_sync():
            value = F.cross_entropy(model(x), labels, reduction=reduction)
            (value / divide_by).backward()
        total = total + value.detach()
    return total


def _divide_grads(model, number):
    for p in model.parameters():
        p.grad /= number


def step_loss_divided(model, optimizer, batch, mesh):
    total = _accumulate(model, optimizer, batch, MICRO_BATCHES)
    optimizer.step()
    return total / MICRO_BATCHES


def step_grad_divided(model, optimizer, batch, mesh):
    total = _accumulate(model, optimizer, batch, 1)
    _divide_grads(model, MICRO_BATCHES)
    optimizer.step()
    return total / MICRO_BATCHES


def step_by_count(model, optimizer, batch, mesh):
    total = _accumulate(model, optimizer, batch, 1, reduction="sum")
    count = torch.tensor(float(len(batch[1])))
    dist.all_reduce(count, group=mesh.get_group("dp"))
    _divide_grads(model, count / mesh.size())
    optimizer.step()
    return total / count


def step_every_time(model, optimizer, batch, mesh):
    total = _accumulate(model, optimizer, batch, MICRO_BATCHES, every_time=True)
    optimizer.step()
    return total / MICRO_BATCHES


EXPECT = {
    name: {"verdict": "pass"} for name in ("loss_divided", "grad_divided", "by_count", "every_time")
}
