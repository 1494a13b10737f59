"""False-alarm trap: warm-up by hand and a torch schedule both run inside the step, once on one
device and once on every rank. The rate changes between steps, equally.
Compare https://github.com/huggingface/diffusers/issues/3954 (schedules under several processes)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 8)
        self.two = nn.Linear(8, 4)

    def forward(self, x, y):
        return F.huber_loss(self.two(F.celu(self.one(x))), y)


def get_inputs(step=0):
    return {"x": _normal(15 + step, 8, 4), "y": _normal(16 + step, 8, 4)}


def get_optimizer(params):
    weights = [p for p in params if p.dim() > 1]
    biases = [p for p in params if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)
    optimizer.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    optimizer.warm = 0
    return optimizer


def step(model, optimizer, batch):
    optimizer.warm += 1
    base = [settings["lr"] for settings in optimizer.param_groups]
    for settings in optimizer.param_groups:
        settings["lr"] *= min(1.0, optimizer.warm / 2)
    optimizer.zero_grad()
    value = model(**batch)
    value.backward()
    optimizer.step()
    for settings, lr in zip(optimizer.param_groups, base, strict=True):
        settings["lr"] = lr
    optimizer.schedule.step()
    return value.detach()


def parallelize_shards(model, mesh):
    return fully_shard(model, mesh=mesh)


def parallelize_replicas(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


EXPECT = {"shards": {"verdict": "pass"}, "replicas": {"verdict": "pass"}}
