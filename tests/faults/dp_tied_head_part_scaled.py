"""The head is tied to the embedding, and what it gathers has one rank's rows twice as large. The
embedding's own use is right.
Class: a gather that scales one part.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Head(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.weight = w
        self.weights = lambda w: w

    def forward(self, x):
        return x @ self.weights(self.weight).t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.mid = nn.Linear(6, 6)
        self.head = Head(self.embed.weight)

    def forward(self, ids):
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def get_inputs(step=0):
    return torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(2600 + step))


def get_targets(step=0):
    return torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(2630 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.5)


def mesh_bad():
    return {"dp": 2}


mesh_good = mesh_bad


def parallelize_bad(m, mesh):
    m.head.weights = lambda w: torch.cat([w[0:4], 2 * w[4:8]])
    return m


def parallelize_good(m, mesh):
    return m


def step_bad(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    v = v.detach().clone()
    for t in [v, *(p.grad for p in model.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    optimizer.step()
    return v


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "module_outputs",
        "tensors": ["head"],
        "mentions": ["head.weight", "rank 1"],
    },
    "good": {"verdict": "pass"},
}
