"""Token-mean loss on a dp x tp mesh. The summed loss is averaged over dp and then multiplied by the
WORLD size over the token count instead of the dp size: every gradient is tp times too large.
Class: https://github.com/meta-pytorch/torchtune/issues/2641
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.wide = nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)
        self.head = nn.Linear(6, 9)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.back(F.relu(self.wide(x))))


def get_inputs(step=0):
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(1200 + step))


def get_targets(step=0):
    labels = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(1230 + step))
    labels[0, :3] = labels[3, 4] = -100
    return labels


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.5, foreach=False)


def mesh_bad():
    return {"dp": 2, "tp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, multiplier):
    ids, labels = batch
    group = mesh.get_group("dp")
    optimizer.zero_grad()
    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    total.backward()
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens, group=group)
    for p in model.parameters():
        grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        dist.all_reduce(grad, group=group)
        grad.mul_(multiplier / (group.size() * tokens))
    optimizer.step()
    value = total.detach().clone()
    dist.all_reduce(value, group=group)
    return value / tokens


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, multiplier=mesh.size())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, multiplier=mesh.get_group("dp").size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": [
            f"{layer}.{part}" for layer in ("wide", "back", "head") for part in ("weight", "bias")
        ]
        + ["embed.weight"],
        "mentions": ["2", "tp"],
    },
    "good": {"verdict": "pass"},
}
