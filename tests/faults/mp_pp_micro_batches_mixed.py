"""Pipeline by hand over micro-batches: the first stage goes backward with the gradient of another
micro-batch, the last one compares with the labels of another, or a stage goes backward twice.
Class: queues of activations that are read in another order than they were filled.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def get_inputs(step=0):
    return _noise(4500 + step, 8, 5)


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(4530 + step))


def loss(o, t):
    return F.cross_entropy(o, t)


def get_optimizer(p):
    return torch.optim.SGD(p, lr=0.3)


M = 4


def _pipe(model, optimizer, batch, mesh, labels, order, twice=()):
    rank, world = (mesh.get_local_rank("pp"), mesh.size())
    stages = {2: [["first"], ["second", "last"]], 3: [["first"], ["second"], ["last"]]}[world]
    optimizer.zero_grad()

    def run(names, x):
        for n in names:
            x = getattr(model, n)(x)
            x = x if n == "last" else torch.tanh(x)
        return x

    xs, ts = (batch[0].chunk(M), batch[1].chunk(M))
    ins, outs, losses = ([], [], [])
    for i in range(M):
        if rank == 0:
            x = xs[i]
        else:
            x = torch.empty(len(xs[i]), 6)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = run(stages[rank], x)
        ins.append(x)
        if rank == world - 1:
            y = loss(y, ts[labels[i]]) / M
            losses.append(y.detach())
        else:
            dist.send(y.detach(), rank + 1)
        outs.append(y)
    for i in range(M):
        if rank == world - 1:
            outs[i].backward()
        else:
            j = order[i] if rank == 0 else i
            g = torch.empty_like(outs[i])
            dist.recv(g, rank + 1)
            for _ in range(2 if i in twice and rank == 0 else 1):
                outs[j].backward(g, retain_graph=True)
        if rank > 0:
            dist.send(ins[i].grad, rank - 1)
    value = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.broadcast(value, world - 1)
    for n, p in model.named_parameters():
        owner = next((s for s, names in enumerate(stages) if n.split(".")[0] in names))
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.broadcast(p.grad, owner)
    optimizer.step()
    return value


def mesh_good():
    return {"pp": 2}


mesh_bad_order = mesh_good
mesh_bad_labels = mesh_good
mesh_bad_every_twice = mesh_good
mesh_bad_twice = mesh_good


def parallelize_good(m, mesh):
    return m


parallelize_bad_every_twice = parallelize_good
parallelize_bad_labels = parallelize_good
parallelize_bad_twice = parallelize_good
parallelize_bad_order = parallelize_good


def step_good(m, o, b, mesh):
    return _pipe(m, o, b, mesh, range(M), range(M))


def step_bad_labels(m, o, b, mesh):
    return _pipe(m, o, b, mesh, [1, 2, 3, 0], range(M))


def step_bad_order(m, o, b, mesh):
    return _pipe(m, o, b, mesh, range(M), [3, 2, 1, 0])


def step_bad_twice(m, o, b, mesh):
    return _pipe(m, o, b, mesh, range(M), range(M), (2,))


def step_bad_every_twice(m, o, b, mesh):
    return _pipe(m, o, b, mesh, range(M), range(M), (0, 1, 2, 3))


EXPECT = {
    "bad_order": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "gradients",
        "tensors": ["first.weight", "first.bias"],
        "mentions": ["second", "another order"],
    },
    "bad_labels": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "loss",
        "tensors": ["loss"],
        "mentions": ["another order"],
    },
    "bad_twice": {
        "verdict": "mismatch",
        "kind": ["double_reduction"],
        "stage": "gradients",
        "tensors": ["first.weight"],
        "mentions": ["twice"],
    },
    "bad_every_twice": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["first.weight", "first.bias"],
        "mentions": ["2.0000"],
    },
    "good": {"verdict": "pass"},
}
