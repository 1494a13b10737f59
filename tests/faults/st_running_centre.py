"""A running mean of features, five samples as 3 + 2. `bad_local` keeps each rank's own mean,
`bad_equal` averages the two means with equal weights; the twin sums features and counts.
Class: https://github.com/pytorch/pytorch/issues/22192 (running statistics and unequal counts)
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
        self.features = nn.Linear(4, 6)
        self.readout = nn.Linear(6, 3)
        self.register_buffer("centre", torch.full((6,), 0.1))

    def mean_of_batch(self, h):
        return h.mean(0)

    def forward(self, x, y):
        h = F.leaky_relu(self.features(x))
        out = self.readout(h - self.centre)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(self.mean_of_batch(h), 0.25)
        return F.mse_loss(out, y)


def get_inputs(step=0):
    return {"x": _normal(14 + step, 5, 4) + 0.5, "y": _normal(44 + step, 5, 3)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.3)


def _whole_batch():
    return {"x": {"dp": None}, "y": {"dp": None}}  # the style takes its own rows below


input_sharding_bad_local = input_sharding_bad_equal = input_sharding_good = _whole_batch


def parallelize_bad_local(model, mesh):
    return model


def parallelize_bad_equal(model, mesh):
    def mean_of_batch(h):
        mean = h.mean(0) / mesh.size()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        return mean

    model.mean_of_batch = mean_of_batch
    return model


def parallelize_good(model, mesh):
    def mean_of_batch(h):
        sums = torch.cat([h.sum(0), h.new_full((1,), h.shape[0])])
        dist.all_reduce(sums, group=mesh.get_group("dp"))
        return sums[:-1] / sums[-1]

    model.mean_of_batch = mean_of_batch
    return model


def step_good(model, optimizer, batch, mesh):
    total, rank = batch["x"].shape[0], mesh.get_local_rank("dp")
    mine = {key: value.tensor_split(mesh.size())[rank] for key, value in batch.items()}
    optimizer.zero_grad()
    value = model(**mine) * (mine["x"].shape[0] / total)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value


step_bad_local = step_bad_equal = step_good


def _fault(*more):
    return {
        "verdict": "mismatch",
        "kind": ["buffer", *more],
        "stage": "buffers",
        "tensors": ["centre"],
        "mentions": ["centre"],
    }


EXPECT = {
    "bad_local": _fault("no_sync"),
    "bad_equal": _fault("mean_of_means", "uneven"),
    "good": {"verdict": "pass"},
}
