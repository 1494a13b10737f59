"""Centralised gradients (g minus its mean) on flat shards padded to equal length: the mean divides
by the padded length. The twin divides by the true count.
Class: https://github.com/facebookresearch/fairscale/issues/767 (statistics of a flat, padded shard)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(3, 5)
        self.high = nn.Linear(5, 5)

    def forward(self, x, y):
        return F.mse_loss(torch.exp(-self.high(torch.sigmoid(self.low(x)))), y)


def get_inputs(step=0):
    return {"x": _normal(40 + step, 8, 3) + 1, "y": _normal(45 + step, 8, 5).abs()}


class Centralised(torch.optim.Optimizer):
    def __init__(self, params, mesh=None, count_padding=False):
        super().__init__(params, {"lr": 0.2})
        self.mesh, self.count_padding = mesh, count_padding

    def _flat_shard(self, tensor):
        size, rank = self.mesh.size(), self.mesh.get_local_rank("dp")
        padded = F.pad(tensor.reshape(-1), (0, -tensor.numel() % size))
        return padded.chunk(size)[rank].clone()

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            for p in settings["params"]:
                if self.mesh is None:
                    p.sub_(settings["lr"] * (p.grad - p.grad.mean()))
                    continue
                w, g = self._flat_shard(p), self._flat_shard(p.grad)
                mean = g.sum()
                dist.all_reduce(mean, group=self.mesh.get_group("dp"))
                mean /= g.numel() * self.mesh.size() if self.count_padding else p.numel()
                w.sub_(settings["lr"] * (g - mean))
                parts = [torch.empty_like(w) for _ in range(self.mesh.size())]
                dist.all_gather(parts, w, group=self.mesh.get_group("dp"))
                p.copy_(torch.cat(parts)[: p.numel()].view_as(p))


def get_optimizer(params):
    return Centralised(params)


def mesh_bad():
    return {"dp": 4}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    return model, Centralised(model.parameters(), mesh, count_padding=True)


def setup_good(model, mesh):
    return model, Centralised(model.parameters(), mesh)


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.div_(mesh.size()), group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["uneven", "optimizer_sharded"],
        "stage": "parameters",
        "tensors": ["high.weight", "high.bias"],
        "mentions": ["high.weight", "Centralised"],
    },
    "good": {"verdict": "pass"},
}
