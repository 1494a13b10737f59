"""Pairwise ranking loss over all pairs of the batch; data parallel forms only the pairs that lie on
one rank. The twin gathers scores (with gradient) and relevances.
Class: https://github.com/HobbitLong/SupContrast/issues/26
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Linear(5, 7)
        self.wide = nn.Linear(5, 1, bias=False)
        self.score = nn.Linear(7, 1, bias=False)

    def forward(self, document):
        return (self.score(torch.tanh(self.deep(document))) + self.wide(document)).squeeze(-1)


def get_inputs(step=0):
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(11100 + step))


def get_targets(step=0):
    return torch.randperm(9, generator=torch.Generator().manual_seed(11200 + step)).float()


def loss(output, targets):
    better = targets[:, None] > targets[None, :]
    return F.softplus(output[None, :] - output[:, None])[better].mean()


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _finish(value, model, optimizer, mesh):
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    return _finish(loss(model(batch[0]), batch[1]), model, optimizer, mesh)


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    group = mesh.get_group("dp")
    scores = torch.cat(dist_nn.all_gather(model(batch[0]), group=group))
    relevance = torch.empty_like(scores)
    dist.all_gather(list(relevance.chunk(mesh.size())), batch[1].to(scores.dtype), group=group)
    return _finish(loss(scores, relevance), model, optimizer, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["cross_sample"],
        "stage": "loss",
        "tensors": ["deep.weight", "deep.bias", "wide.weight", "score.weight"],
        "mentions": ["dp"],
    },
    "good": {"verdict": "pass"},
}
