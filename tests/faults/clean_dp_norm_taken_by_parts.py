"""False-alarm trap: active clipping under fully_shard and DDP, by torch's function and by squares
of shards summed over the group - other code than one device runs, same norm.
Compare https://github.com/radixark/miles_diffusion/pull/35
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

MAX_NORM = 0.15


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def get_inputs(step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(16800 + step))


def get_targets(step=0):
    return torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(16900 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=1.0)


def _train(model, optimizer, batch, clip):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    clip(model.parameters())
    optimizer.step()
    return value.detach()


def _torch_clip(parameters):
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, _torch_clip)


def mesh_sharded():
    return {"fsdp": 2}


mesh_by_hand = mesh_sharded


def parallelize_replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_sharded(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_by_hand = parallelize_sharded


def step_by_hand(model, optimizer, batch, mesh):
    def clip(parameters):
        locals_ = [p.grad.to_local() for p in parameters]
        squares = sum(g.square().sum() for g in locals_)
        dist.all_reduce(squares, group=mesh.get_group("fsdp"))
        for g in locals_:
            g.mul_((MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0))

    return _train(model, optimizer, batch, clip)


EXPECT = {name: {"verdict": "pass"} for name in ("replicated", "sharded", "by_hand")}
