"""Sequence cut over sp; gradients are summed in a loop over `state_dict(keep_vars=True)`, which
lists a tied weight under both its names: its gradient is summed twice. The twin walks over
`parameters()`.
Class: https://github.com/deepspeedai/DeepSpeed/issues/966,
https://github.com/NVIDIA/Megatron-LM/pull/6500 (tied weights)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def get_inputs(step=0):
    return torch.randint(0, 9, (3, 8), generator=torch.Generator().manual_seed(6100 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (3, 8), generator=torch.Generator().manual_seed(6130 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.7)


def mesh_bad():
    return {"sp": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"ids": {"sp": 1}, "targets": {"sp": 1}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, tensors):
    group = mesh.get_group("sp")
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1]) / group.size()
    value.backward()
    for tensor in tensors:
        dist.all_reduce(tensor.grad, group=group)
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, model.state_dict(keep_vars=True).values())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, model.parameters())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction", "factor", "tied"],
        "stage": "gradients",
        "tensors": ["embed.weight"],
        "mentions": ["embed.weight", "2", "sp"],
    },
    "good": {"verdict": "pass"},
}
