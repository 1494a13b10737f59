"""Training is right, but the logged loss is rank 0's, sent to all ranks, not the mean over ranks.
The twin averages it.
Class: https://github.com/pytorch/torchtitan/pull/4711 (reported loss) and https://github.com/huggingface/transformers/pull/48167
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.recur = nn.RNN(4, 5, batch_first=True)
        self.out = nn.Linear(5, 6)

    def forward(self, ids):
        return self.out(self.recur(self.embed(ids))[0])


def get_inputs(step=0):
    return torch.randint(0, 6, (9, 4), generator=torch.Generator().manual_seed(12000 + step))


def get_targets(step=0):
    return torch.randint(0, 6, (9, 4), generator=torch.Generator().manual_seed(12100 + step))


def loss(output, targets):
    return F.cross_entropy(output.mT, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_bad():
    return {"dp": 3}


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


mesh_good, parallelize_good = mesh_bad, parallelize_bad


def _train(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach().clone()


def step_bad(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch)
    dist.broadcast(value, group_src=0, group=mesh.get_group("dp"))
    return value


def step_good(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch)
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value / mesh.size()


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["reported_value"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss", "rank 0"],
    },
    "good": {"verdict": "pass"},
}
