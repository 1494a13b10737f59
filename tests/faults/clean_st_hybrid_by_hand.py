"""False-alarm trap: hybrid sharding by hand on 2 x 2 ranks - reduce-scatter over one axis,
all-reduce over the other, flat update, all-gather. The model's own gradients stay local.
Compare https://github.com/pytorch/torchtitan/pull/3847 (hybrid and plain sharding, order of sums)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.inner = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.outer = nn.Linear(7, 9)

    def forward(self, ids):
        return self.outer(self.norm(F.softplus(self.inner(self.words(ids)))))


def _ids(seed):
    return torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(77 + step)


def get_targets(step=0):
    return _ids(87 + step)


def loss(output, targets):
    return F.cross_entropy(output.transpose(1, 2), targets)


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


def mesh_flat():
    return {"replicate": 2, "shard": 2}


def _padded(tensors, parts):
    flat = parameters_to_vector([t.detach() for t in tensors])
    return F.pad(flat, (0, -flat.numel() % parts))


def setup_flat(model, mesh):
    whole = _padded(list(model.parameters()), 2)
    mine = whole.chunk(2)[mesh.get_local_rank("shard")].clone()
    return model, get_optimizer([nn.Parameter(mine)])


def step_flat(model, optimizer, batch, mesh):
    ids, targets = batch
    model.zero_grad()
    value = loss(model(ids), targets)
    value.backward()
    shard = optimizer.param_groups[0]["params"][0]
    grads = _padded([p.grad for p in model.parameters()], 2) / mesh.size()
    shard.grad = torch.empty_like(shard)
    dist.reduce_scatter_tensor(shard.grad, grads, group=mesh.get_group("shard"))
    dist.all_reduce(shard.grad, group=mesh.get_group("replicate"))
    optimizer.step()
    flat = torch.empty_like(grads)
    dist.all_gather_into_tensor(flat, shard.detach(), group=mesh.get_group("shard"))
    vector_to_parameters(flat, model.parameters())
    return value.detach()


EXPECT = {"flat": {"verdict": "pass"}}
