"""Convolution weights are flattened with channels last for the sharded update and viewed back with
channels first: same shape, taps and channels mixed. The twin undoes the permutation.
Class: https://github.com/vllm-project/vllm/pull/36242 (written back in another order)
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
        self.stem = nn.Conv2d(1, 4, 3)
        self.body = nn.Conv2d(4, 4, 2)
        self.head = nn.Linear(4, 2)

    def forward(self, image, y):
        h = F.silu(self.body(F.silu(self.stem(image))))
        return F.mse_loss(self.head(h.mean((2, 3))), y)


def get_inputs(step=0):
    return {"image": _normal(111 + step, 4, 1, 5, 5), "y": _normal(121 + step, 4, 2)}


class FlatSGD(torch.optim.Optimizer):
    def __init__(self, params, mesh=None, undo=True):
        super().__init__(params, {"lr": 0.3})
        self.mesh, self.undo = mesh, undo

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            for p in settings["params"]:
                if self.mesh is None:
                    p.sub_(p.grad, alpha=settings["lr"])
                else:
                    self._sharded(p, settings["lr"])

    def _sharded(self, p, lr):
        size, rank = self.mesh.size(), self.mesh.get_local_rank("dp")
        last = p.movedim(1, -1) if p.dim() == 4 else p
        flat = last.reshape(-1)
        grad = (p.grad.movedim(1, -1) if p.dim() == 4 else p.grad).reshape(-1)
        mine = flat.chunk(size)[rank] - lr * grad.chunk(size)[rank]
        parts = [torch.empty_like(part) for part in flat.chunk(size)]
        dist.all_gather(parts, mine, group=self.mesh.get_group("dp"))
        flat = torch.cat(parts)
        if p.dim() == 4 and self.undo:
            p.copy_(flat.view(last.shape).movedim(-1, 1))
        else:
            p.copy_(flat.view(p.shape))


def get_optimizer(params):
    return FlatSGD(params)


def _setup(model, mesh, undo):
    optimizer = FlatSGD(model.parameters(), mesh, undo)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


def setup_bad(model, mesh):
    return _setup(model, mesh, False)


def setup_good(model, mesh):
    return _setup(model, mesh, True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "parameters",
        "tensors": ["body.weight"],  # with one input channel the order of `stem` is the same
        "mentions": ["body.weight"],
    },
    "good": {"verdict": "pass"},
}
