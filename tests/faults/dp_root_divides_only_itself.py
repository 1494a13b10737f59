"""Parameter-server style averaging: rank 0 divides its own gradient before it collects the others',
which arrive undivided, and sends the result out. All ranks agree, rank 0's samples count a third.
The twin divides the sum.
Class: https://github.com/pytorch/pytorch/pull/60118 (replicas that agree prove nothing)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 4)
        self.decode = nn.Linear(4, 8)

    def forward(self, x):
        return self.decode(torch.sigmoid(self.encode(x)))


def get_inputs(step=0):
    return torch.rand(9, 8, generator=torch.Generator().manual_seed(6500 + step))


def get_targets(step=0):
    return get_inputs(step)


def loss(output, targets):
    return F.binary_cross_entropy_with_logits(output, targets)


def get_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.1)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return model


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, divide_first):
    x, wanted = batch
    optimizer.zero_grad()
    value = loss(model(x), wanted)
    value.backward()
    rank, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    for p in model.parameters():
        if rank == 0 and divide_first:
            p.grad /= mesh.size()
        dist.reduce(p.grad, dst=0, group=group)
        if rank == 0 and not divide_first:
            p.grad /= mesh.size()
        dist.broadcast(p.grad, src=0, group=group)
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divide_first=True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, divide_first=False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["encode.weight", "encode.bias", "decode.weight", "decode.bias"],
        "mentions": ["rank 0"],
    },
    "good": {"verdict": "pass"},
}
