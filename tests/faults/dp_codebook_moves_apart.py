"""Vector quantisation with a codebook kept as a running average in buffers. `local`: each rank
averages its own codes; `first`: DDP's buffer broadcast throws away all but rank 0's. The twins sum
the statistics before the update.
Class: https://github.com/ZhikangNiu/encodec-pytorch/issues/15
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Codebook(nn.Module):
    def __init__(self, codes, width):
        super().__init__()
        self.register_buffer("hits", torch.ones(codes))
        self.register_buffer("sums", torch.randn(codes, width))
        self.group = None

    def forward(self, z):
        chosen = F.one_hot(
            torch.cdist(z, self.sums / self.hits[:, None]).argmin(-1), len(self.hits)
        )
        chosen = chosen.to(z.dtype)
        quantised = chosen @ (self.sums / self.hits[:, None])
        if not self.training:
            return quantised
        hits, sums = chosen.sum(0), chosen.T @ z.detach()
        if self.group is not None:
            dist.all_reduce(hits, group=self.group)
            dist.all_reduce(sums, group=self.group)
        self.hits.mul_(0.7).add_(hits, alpha=0.3)
        self.sums.mul_(0.7).add_(sums, alpha=0.3)
        return quantised


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 3)
        self.book = Codebook(4, 3)
        self.decode = nn.Linear(3, 6)

    def forward(self, x):
        z = self.encode(x)
        quantised = self.book(z)
        return self.decode(z + (quantised - z).detach()), z, quantised


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(11700 + step))


def get_targets(step=0):
    return get_inputs(step)


def loss(output, targets):
    decoded, z, quantised = output
    return F.mse_loss(decoded, targets) + 0.25 * F.mse_loss(z, quantised.detach())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def _wrap(model, mesh, broadcast, shared):
    group = mesh.get_group("dp")
    model.book.group = group if shared else None
    return DistributedDataParallel(model, process_group=group, forward_sync_buffers=broadcast)


def parallelize_bad_local(model, mesh):
    return _wrap(model, mesh, broadcast=False, shared=False)


def parallelize_good_local(model, mesh):
    return _wrap(model, mesh, broadcast=False, shared=True)


def parallelize_bad_first(model, mesh):
    return _wrap(model, mesh, broadcast=True, shared=False)


def parallelize_good_first(model, mesh):
    return _wrap(model, mesh, broadcast=True, shared=True)


FAULT = {
    "verdict": "mismatch",
    "kind": ["buffer"],
    "stage": "buffers",
    "tensors": ["book.hits", "book.sums"],
    "mentions": ["book.hits"],
}
EXPECT = {
    "bad_local": FAULT,
    "good_local": {"verdict": "pass"},
    "bad_first": FAULT,
    "good_first": {"verdict": "pass"},
}
