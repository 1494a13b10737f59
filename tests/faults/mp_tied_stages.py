"""Embedding and output head share a weight but live on two pipeline stages. Each stage steps its
own copy with its own share of the gradient and the copies drift. The twin sums the two shares
before the optimizer.
Class: https://github.com/NVIDIA/Megatron-LM/issues/656
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, MICRO = 9, 6, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def front(self, ids):
        return torch.tanh(self.first(self.embed(ids)))

    def rear(self, hidden):
        return self.head(hidden + torch.tanh(self.second(hidden)))

    def forward(self, ids):
        return self.rear(self.front(ids))


def get_inputs(step=0):
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(3100 + step))


def get_targets(step=0):
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(3130 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mesh_bad():
    return {"pp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    if mesh.get_local_rank("pp") == 0:
        model.second = model.head = None
    else:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        model.embed = model.first = None
    return model


parallelize_good = parallelize_bad


def _front_stage(model, ids):
    for part in ids.chunk(MICRO):
        hidden = model.front(part)
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)


def _rear_stage(model, targets):
    total = torch.zeros(())
    for part in targets.chunk(MICRO):
        hidden = torch.empty(*part.shape, WIDTH)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        value = loss(model.rear(hidden), part) / MICRO
        value.backward()
        dist.send(hidden.grad, 0)
        total += value.detach()
    return total


def _train(model, optimizer, batch, mesh, share):
    optimizer.zero_grad()
    if model.embed is not None:
        total, tied = _front_stage(model, batch[0]), model.embed.weight
    else:
        total, tied = _rear_stage(model, batch[1]), model.head.weight
    if share:
        dist.all_reduce(tied.grad, group=mesh.get_group("pp"))
    optimizer.step()
    return total


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, share=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, share=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["tied"],
        "stage": "gradients",
        "tensors": ["embed.weight"],
        "mentions": ["embed.weight", "head.weight"],
    },
    "good": {"verdict": "pass"},
}
