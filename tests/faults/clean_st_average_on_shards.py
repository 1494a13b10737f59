"""False-alarm trap: a moving average of the weights lives in the model as a frozen copy and follows
shard by shard, uneven and empty shards included, or on whole tensors under DDP. Both are right.
Compare https://github.com/pytorch/pytorch/issues/117742 (shard-wise averages)
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, 2))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x, y):
        return F.mse_loss(self.net(x), y)


def get_inputs(step=0):
    return {"x": _normal(131 + step, 6, 5), "y": _normal(231 + step, 6, 2)}


def get_optimizer(params):
    return torch.optim.RAdam([p for p in params if p.requires_grad], lr=0.05)


def _local(tensors):
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    inner = getattr(model, "module", model)
    with torch.no_grad():
        averages, weights = _local(inner.average.parameters()), _local(inner.net.parameters())
        torch._foreach_lerp_(averages, weights, 0.1)
    return value.detach()


def mesh_sharded():
    return {"dp": 3}


mesh_replicated = mesh_sharded


def parallelize_sharded(model, mesh):
    for part in (model.net, model.average, model):
        fully_shard(part, mesh=mesh)
    return model


def parallelize_replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {"sharded": {"verdict": "pass"}, "replicated": {"verdict": "pass"}}
