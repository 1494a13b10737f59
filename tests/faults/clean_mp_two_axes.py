"""False-alarm trap: a dp x tp mesh done twice. `wrapped` shards the tensor-parallel DTensors once
more with fully_shard, `looped` averages gradients over dp in the training loop, local parts and
plain parameters alike.
Compare https://github.com/pytorch/pytorch/issues/134715
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.back(F.gelu(self.wide(x)))))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(5800 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(5830 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02, eps=1e-3, foreach=False)


def mesh_looped():
    return {"dp": 2, "tp": 2}


mesh_wrapped = mesh_looped


def parallelize_looped(model, mesh):
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def parallelize_wrapped(model, mesh):
    return fully_shard(parallelize_looped(model, mesh), mesh=mesh["dp"])


def step_looped(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grad.div_(2)
    optimizer.step()
    return value.detach()


EXPECT = {name: {"verdict": "pass"} for name in ("looped", "wrapped")}
