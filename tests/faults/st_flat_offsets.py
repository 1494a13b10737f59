"""Flat-buffer optimizer state: tensors are packed at offsets aligned to eight elements and unpacked
back to back, so everything behind the first odd-sized tensor comes back shifted. The twin unpacks
at the aligned offsets. Class: https://github.com/NVIDIA/Megatron-LM/pull/6500 (flat layouts)
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
        self.bend = nn.Linear(4, 6)
        self.turn = nn.Linear(6, 6)
        self.exit = nn.Linear(6, 2)

    def forward(self, x):
        return self.exit(F.selu(self.turn(F.selu(self.bend(x)))))


def get_inputs(step=0):
    return _normal(515 + step, 8, 4)


def get_targets(step=0):
    return _normal(565 + step, 8, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _offsets(tensors, align):
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += -(-tensor.numel() // align) * align
    return starts, at


def _pack(tensors, align):
    starts, length = _offsets(tensors, align)
    flat = tensors[0].new_zeros(length)
    for tensor, start in zip(tensors, starts, strict=True):
        flat[start : start + tensor.numel()] = tensor.detach().reshape(-1)
    return flat


def setup_bad(model, mesh):
    whole = _pack(list(model.parameters()), 8)
    shard = nn.Parameter(whole.chunk(mesh.size())[mesh.get_local_rank("dp")].clone())
    return model, get_optimizer([shard])


setup_good = setup_bad


def _train(model, optimizer, batch, mesh, unpack_align):
    x, y = batch
    size, rank, group = mesh.size(), mesh.get_local_rank("dp"), mesh.get_group("dp")
    model.zero_grad()
    value = loss(model(x), y)
    value.backward()
    params = list(model.parameters())
    for p in params:
        dist.all_reduce(p.grad.div_(size), group=group)
    shard = optimizer.param_groups[0]["params"][0]
    shard.grad = _pack([p.grad for p in params], 8).chunk(size)[rank].clone()
    optimizer.step()
    flat = shard.detach().new_empty(shard.numel() * size)
    dist.all_gather(list(flat.chunk(size)), shard.detach(), group=group)
    with torch.no_grad():
        for p, start in zip(params, _offsets(params, unpack_align)[0], strict=True):
            p.copy_(flat[start : start + p.numel()].view_as(p))
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 8)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "parameters",
        "tensors": ["turn.weight", "turn.bias", "exit.weight", "exit.bias"],
        "mentions": ["turn.weight"],
    },
    "good": {"verdict": "pass"},
}
