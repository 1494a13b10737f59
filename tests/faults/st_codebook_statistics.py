"""Codebook learned by moving averages of counts and sums. `bad_local` never shares a rank's batch
statistics; `bad_decayed` sums the averages after the decay, which counts the old value W times.
The twin sums the batch statistics. Class: https://github.com/ZhikangNiu/encodec-pytorch/issues/15
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 3)
        self.decode = nn.Linear(3, 6)
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("sums", _normal(90, 4, 3))

    def share_batch(self, tensor):
        return tensor

    def share_average(self, tensor):
        return tensor

    def forward(self, x):
        z = self.encode(x)
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(z.detach(), codes).argmin(-1)
        code = codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 4).to(z.dtype)
                counts, sums = self.share_batch(chosen.sum(0)), self.share_batch(chosen.t() @ z)
                self.counts.copy_(self.share_average(0.8 * self.counts + 0.2 * counts))
                self.sums.copy_(self.share_average(0.8 * self.sums + 0.2 * sums))
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + F.mse_loss(z, code)


def get_inputs(step=0):
    return _normal(60 + step, 12, 6) * torch.linspace(0.5, 1.5, 12)[:, None]


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def mesh_bad_local():
    return {"dp": 3}


mesh_bad_decayed = mesh_good = mesh_bad_local


def _wrap(model, mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(model, process_group=group, broadcast_buffers=False)


def _sum_over(mesh):
    def total(tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=mesh.get_group("dp"))
        return tensor

    return total


def parallelize_bad_local(model, mesh):
    return _wrap(model, mesh)


def parallelize_bad_decayed(model, mesh):
    model.share_average = _sum_over(mesh)
    return _wrap(model, mesh)


def parallelize_good(model, mesh):
    model.share_batch = _sum_over(mesh)
    return _wrap(model, mesh)


def _fault(*more):
    return {
        "verdict": "mismatch",
        "kind": ["buffer", *more],
        "stage": "buffers",
        "tensors": ["counts", "sums"],
        "mentions": ["counts", "sums"],
    }


EXPECT = {
    "bad_local": _fault("no_sync"),
    "bad_decayed": _fault("double_reduction"),
    "good": {"verdict": "pass"},
}
