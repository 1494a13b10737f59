"""A temperature schedule counts updates in a buffer; "to keep buffers in step" the style sums every
buffer over the ranks, so after one update the count is W. The twin broadcasts rank 0's.
Class: https://github.com/huggingface/pytorch-image-models/issues/110 (what ranks do with buffers)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.score = nn.Linear(5, 7)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        logits = self.score(torch.tanh(self.table(ids))) / (1.0 + 0.5 * self.updates)
        if self.training:
            self.updates += 1
        return logits


def _ids(seed):
    return torch.randint(0, 7, (8, 3), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(401 + step)


def get_targets(step=0):
    return _ids(451 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.NAdam(params, lr=0.02)


def mesh_bad():
    return {"dp": 4}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh):
    ids, targets = batch
    optimizer.zero_grad()
    value = loss(model(ids), targets)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.div_(mesh.size()), group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch, mesh)
    for buffer in model.buffers():
        dist.all_reduce(buffer, group=mesh.get_group("dp"))
    return value


def step_good(model, optimizer, batch, mesh):
    value = _train(model, optimizer, batch, mesh)
    for buffer in model.buffers():
        dist.broadcast(buffer, group=mesh.get_group("dp"), group_src=0)
    return value


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["buffer", "factor", "double_reduction"],
        "stage": "buffers",
        "tensors": ["updates"],
        "mentions": ["updates"],
    },
    "good": {"verdict": "pass"},
}
