"""Five hidden columns on two ranks: shards are padded to three, the sixth column is zero. `bad`
keeps the padding in the gathered activation, so the norm that follows divides by six. The twin cuts
it off.
Class: https://github.com/pytorch/pytorch/issues/162692,
https://github.com/pytorch/torchtitan/pull/4535 (uneven shards)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH = 5


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class RootMeanSquare(nn.Module):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Linear(4, WIDTH)
        self.norm = RootMeanSquare()
        self.out = nn.Linear(WIDTH, 3)

    def collect(self, part):
        return part

    def forward(self, x, y):
        hidden = self.norm(self.collect(torch.tanh(self.grow(x))))
        return F.mse_loss(self.out(hidden[..., :WIDTH]), y)


def get_inputs(step=0):
    return {"x": _noise(3800 + step, 6, 4), "y": _noise(3830 + step, 6, 3)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.5)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def mesh_bad():
    return {"tp": 2}


mesh_good = mesh_bad


def _parallelize(model, mesh, kept):
    group = mesh.get_group("tp")
    for name, p in list(model.grow.named_parameters()):
        padded = torch.cat([p.detach(), p.new_zeros(1, *p.shape[1:])])
        setattr(model.grow, name, nn.Parameter(padded.chunk(2)[group.rank()].clone()))
    model.collect = lambda part: _Collect.apply(part, group)[..., :kept]
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, kept=WIDTH + 1)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, kept=WIDTH)


def gather_bad(name, local_tensors):
    if name.startswith("grow"):
        return torch.cat(local_tensors)[:WIDTH]
    return local_tensors[0]


gather_good = gather_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["uneven", "factor"],
        "stage": "module_outputs",
        "tensors": ["norm"],
        "mentions": ["norm", "6", "5"],
    },
    "good": {"verdict": "pass"},
}
