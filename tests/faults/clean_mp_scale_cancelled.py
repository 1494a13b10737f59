"""False-alarm trap: the loss is multiplied by cp, the wrapper then averages over dp and cp
together, and the local loss was divided by the GLOBAL token count times dp: the "extra" factor
cancels. Token counts are uneven on purpose.
Compare https://github.com/NVIDIA/Megatron-LM/issues/673
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(5100 + step))


def get_targets(step=0):
    labels = torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(5130 + step))
    labels[0, :5] = labels[3, 2] = -100
    return labels


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.8)


def mesh_cancelled():
    return {"dp": 2, "cp": 2}


def input_sharding_cancelled():
    return {"ids": {"dp": 0, "cp": 1}, "targets": {"dp": 0, "cp": 1}}


def parallelize_cancelled(model, mesh):
    return DistributedDataParallel(model)


def step_cancelled(model, optimizer, batch, mesh):
    ids, labels = batch
    optimizer.zero_grad()
    count = (labels != -100).sum()
    dist.all_reduce(count)
    logits = model(ids).flatten(0, 1)
    part = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    cp = mesh.get_group("cp").size()
    value = part * mesh.get_group("dp").size() / count * cp  # DDP divides by dp * cp
    value.backward()
    optimizer.step()
    total = part.detach().clone()
    dist.all_reduce(total)
    return total / count


EXPECT = {"cancelled": {"verdict": "pass"}}
