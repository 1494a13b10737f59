"""State sharded over both axes of a 2 x 2 mesh, owner of part i + 2 j being the rank at (j, i). The
gathered list is in rank order of the flattened group; `bad` reads it as if parts ran down the first
axis. Class: https://github.com/vllm-project/vllm/pull/36242 (a gather that rearranges)
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
        self.patch = nn.Conv2d(1, 8, 2, stride=2)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        h = self.patch(image).flatten(2).transpose(1, 2)
        return self.head((h + torch.tanh(self.mix(h))).mean(1))


def get_inputs(step=0):
    return _normal(640 + step, 8, 1, 4, 4)


def get_targets(step=0):
    return torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(690 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.RMSprop(params, lr=0.01, eps=1e-2)


def mesh_bad():
    return {"replicate": 2, "shard": 2}


mesh_good = mesh_bad


def setup_bad(model, mesh):
    part = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    owned = [nn.Parameter(p.detach().chunk(4)[part].clone()) for p in model.parameters()]
    return model, get_optimizer(owned)


setup_good = setup_bad


def _train(model, optimizer, batch, mesh, order):
    image, label = batch
    part = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    model.zero_grad()
    value = loss(model(image), label)
    value.backward()
    owned = optimizer.param_groups[0]["params"]
    for p, mine in zip(model.parameters(), owned, strict=True):
        for axis in ("replicate", "shard"):
            dist.all_reduce(p.grad.div_(2), group=mesh.get_group(axis))
        mine.grad = p.grad.chunk(4)[part].clone()
    optimizer.step()
    for p, mine in zip(model.parameters(), owned, strict=True):
        row = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(row, mine.detach(), group=mesh.get_group("shard"))
        rows = [torch.empty_like(torch.stack(row)) for _ in range(2)]
        dist.all_gather(rows, torch.stack(row), group=mesh.get_group("replicate"))
        parts = [piece for gathered in rows for piece in gathered]
        p.data.copy_(torch.cat([parts[index] for index in order]))
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, (0, 2, 1, 3))


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, (0, 1, 2, 3))


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["layout"],
        "stage": "parameters",
        "tensors": ["patch.weight", "mix.weight", "head.weight"],
        "mentions": ["mix.weight"],
    },
    "good": {"verdict": "pass"},
}
