"""Expert capacity: at most C tokens of the batch go to one expert, later ones fall through. With
tokens cut over ep, the fault fills C / ep places per rank from its own order, so other tokens are
dropped than on one device.
Class: https://github.com/laekov/fastmoe/issues/106 (experts that behave otherwise when spread over
workers)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CAPACITY = 4


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.Parameter(0.5 * torch.randn(3, 5, 5))
        self.capacity = CAPACITY

    def earlier(self, count):
        return torch.zeros_like(count)

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(choice, 3)
        place = chosen.cumsum(0) + self.earlier(chosen.sum(0))
        kept = (place * chosen).sum(-1) <= self.capacity
        routed = torch.einsum("ni,nij->nj", x, self.experts[choice])
        return x + routed * (weight * kept)[:, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = Mixture()
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.mixture(x))


def get_inputs(step=0):
    return _noise(1800 + step, 16, 5)


def get_targets(step=0):
    return _noise(1830 + step, 16, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def mesh_bad():
    return {"ep": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"ep": 0}, "targets": {"ep": 0}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    model.mixture.capacity = CAPACITY // mesh.size()
    return model


def parallelize_good(model, mesh):
    group = mesh.get_group("ep")

    def earlier(count):
        counts = [torch.empty_like(count) for _ in range(group.size())]
        dist.all_gather(counts, count, group=group)
        return sum(counts[: group.rank()], torch.zeros_like(count))

    model.mixture.earlier = earlier
    return model


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("ep"))
        tensor.div_(mesh.size())
    optimizer.step()
    return value


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["cross_sample", "position", "unexplained"],
        "stage": "module_outputs",
        "tensors": ["mixture"],
        "mentions": ["mixture"],
    },
    "good": {"verdict": "pass"},
}
