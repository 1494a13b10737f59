"""False-alarm trap: the parallel side runs the loop, multi-tensor or fused form of AdamW, one
device the default. They round differently, nothing else.
Compare https://github.com/horovod/horovod/issues/1548 (fusion that moves the last digits)
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
        self.stem = nn.Conv2d(1, 4, 3)
        self.body = nn.Linear(16, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, image, label):
        h = torch.tanh(self.body(F.silu(self.stem(image)).flatten(1)))
        return F.cross_entropy(self.head(h), label)


def get_inputs(step=0):
    label = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(66 + step))
    return {"image": _normal(67 + step, 8, 1, 4, 4), "label": label}


SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.05}


def get_optimizer(params):
    return torch.optim.AdamW(params, **SETTINGS)


def setup_loop(model, mesh):
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return model, torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)


def setup_fused(model, mesh):
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return model, torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)


def setup_foreach(model, mesh):
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return model, torch.optim.AdamW(model.parameters(), foreach=True, **SETTINGS)


def setup_foreach_shards(model, mesh):
    model = fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), foreach=True, **SETTINGS)


EXPECT = {name: {"verdict": "pass"} for name in ("loop", "fused", "foreach", "foreach_shards")}
