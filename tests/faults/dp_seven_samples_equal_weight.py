"""Seven samples split four and three: both ranks' means get the weight one half, so a sample on the
short rank counts more. The twin weighs by the samples.
Class: https://github.com/pytorch/pytorch/issues/22192 (equal weights for unequal counts)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fold = nn.Linear(6, 9)
        self.norm = nn.LayerNorm(9)
        self.out = nn.Linear(9, 2)
        nn.init.uniform_(self.norm.bias, -0.2, 0.6)

    def forward(self, x):
        return self.out(torch.cos(self.norm(self.fold(x))))


def get_inputs(step=0):
    return {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(13700 + step))}


def get_targets(step=0):
    return torch.randn(7, 2, generator=torch.Generator().manual_seed(13800 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def input_sharding_bad():
    return {"x": {"dp": None}, "targets": {"dp": None}}  # seven rows do not split evenly


def parallelize_bad(model, mesh):
    return model


input_sharding_good, parallelize_good = input_sharding_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, by_samples):
    size, rank = mesh.size(), mesh.get_local_rank("dp")
    x, wanted = (batch[key].tensor_split(size)[rank] for key in ("x", "targets"))
    share = x.shape[0] / batch["x"].shape[0] if by_samples else 1 / size
    optimizer.zero_grad()
    value = loss(model(x), wanted) * share
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()  # the ranks' shares add up


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, by_samples=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, by_samples=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["uneven", "mean_of_means"],
        "stage": "loss",
        "tensors": ["fold.weight", "norm.weight", "out.weight", "out.bias"],
        "mentions": ["4", "3"],
    },
    "good": {"verdict": "pass"},
}
