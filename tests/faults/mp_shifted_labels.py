"""Next-token labels are made by shifting INSIDE each sequence shard: the last token of every shard
but the last loses its label, and the denominators shrink with it. The twin shifts the whole
sequence, then cuts.
Class: https://github.com/huggingface/transformers/pull/41832 (loss of sequence-parallel training)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, ids):
        return self.head(F.leaky_relu(self.mid(self.embed(ids))))


def _cost(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def _shift(ids):
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def get_inputs(step=0):
    return torch.randint(0, 10, (3, 9), generator=torch.Generator().manual_seed(3000 + step))


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.8, weight_decay=0.02)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = _cost(model(batch[0]), _shift(batch[0]))
    value.backward()
    optimizer.step()
    return value.detach()


def mesh_bad():
    return {"sp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, ids, labels, mesh):
    group = mesh.get_group("sp")
    optimizer.zero_grad()
    count = (labels != -100).sum()
    dist.all_reduce(count, group=group)
    value = _cost(model(ids), labels, "sum") / count
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=group)
    optimizer.step()
    return value


def _own(tokens, mesh):
    return tokens.chunk(mesh.size(), 1)[mesh.get_local_rank("sp")]


def step_bad(model, optimizer, batch, mesh):
    ids = _own(batch[0], mesh)
    return _train(model, optimizer, ids, _shift(ids), mesh)


def step_good(model, optimizer, batch, mesh):
    ids, labels = _own(batch[0], mesh), _own(_shift(batch[0]), mesh)
    return _train(model, optimizer, ids, labels, mesh)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["position"],
        "stage": "loss",
        "tensors": [],
        "mentions": ["loss", "sp"],
    },
    "good": {"verdict": "pass"},
}
