"""Tokens are sorted by expert. In one style the experts' outputs are not put back into the order
of the tokens, in another only the outputs are sorted and the combine weights are not.
Class: an unpermute left out or done on one of two tensors in expert-parallel layers.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Moe(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.gate = nn.Linear(d, n)
        self.w1 = nn.Parameter(0.5 * torch.randn(n, d, 8))
        self.w2 = nn.Parameter(0.5 * torch.randn(n, 8, d))
        self.mode = None

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, who = probs.max(-1)
        order = who.argsort(stable=True)
        xs, ws, es = (x[order], weight[order], who[order])
        h = torch.einsum("td,tdh->th", xs, self.w1[es])
        y = torch.einsum("th,thd->td", F.silu(h), self.w2[es])
        if self.mode == "weights":
            ws = weight
        if self.mode == "order":
            return y * ws[:, None]
        if self.mode == "gated":
            return y * weight[:, None]
        y = y * ws[:, None]
        return torch.zeros_like(y).index_copy(0, order, y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.moe = Moe()
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(x + self.moe(x))


def get_inputs(step=0):
    return _noise(4500 + step, 16, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(4530 + step))


def loss(o, t):
    return F.cross_entropy(o, t)


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.3)


def mesh_bad_order():
    return {"dp": 2}


def mesh_bad_weights():
    return {"dp": 2}


def mesh_good():
    return {"dp": 2}


def _p(m, mode):
    m.moe.mode = mode
    return m


def parallelize_bad_order(m, mesh):
    return _p(m, "order")


def parallelize_bad_weights(m, mesh):
    return _p(m, "weights")


def parallelize_good(m, mesh):
    return _p(m, None)


def step_bad_order(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    v = loss(model(batch[0]), batch[1])
    v.backward()
    v = v.detach().clone()
    for t in [v, *(p.grad for p in model.parameters())]:
        dist.all_reduce(t)
        t.div_(mesh.size())
    optimizer.step()
    return v


step_good = step_bad_order
step_bad_weights = step_bad_order

EXPECT = {
    "bad_order": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["moe"],
        "mentions": ["moe", "another order"],
    },
    "bad_weights": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "module_outputs",
        "tensors": ["moe"],
        "mentions": ["moe", "weights of other rows"],
    },
    "good": {"verdict": "pass"},
}
