"""Hand-written clipping under fully_shard takes the norm of this rank's gradient shards, so every
rank scales by another factor. The twin calls clip_grad_norm_, which reduces the norm.
Class: https://github.com/huggingface/optimum-habana/pull/2280 (clipping that sees a shard)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

MAX_NORM = 0.1


def _ids(seed, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.cell = nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 12)

    def forward(self, ids):
        state, outputs = torch.zeros_like(self.table(ids[:, 0])), []
        for column in ids.unbind(1):
            state = self.cell(self.table(column), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, -1)


def get_inputs(step=0):
    return _ids(313 + step, 12, 6, 3)


def get_targets(step=0):
    return _ids(323 + step, 12, 6, 3)


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def _backward(model, optimizer, batch):
    ids, targets = batch
    optimizer.zero_grad()
    value = loss(model(ids), targets)
    value.backward()
    return value.detach()


def step(model, optimizer, batch):
    value = _backward(model, optimizer, batch)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return value


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return fully_shard(model, mesh=mesh)


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    return value


def step_good(model, optimizer, batch, mesh):
    return step(model, optimizer, batch)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip"],
        "stage": ["gradients", "clipping"],
        "tensors": ["table.weight", "head.weight"],
        "mentions": ["norm"],
    },
    "good": {"verdict": "pass"},
}
