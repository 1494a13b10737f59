"""The parallel step takes the cross-entropy of bfloat16 logits, one device that of the logits as
they are: the loss and every gradient carry three digits. The twin does not cast.
Class: https://github.com/vllm-project/speculators/pull/788 (loss in a lower type)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(13, 8)
        self.place = nn.Embedding(4, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU6(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 13)

    def forward(self, ids):
        h = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(h + self.mlp(h))


def _ids(seed):
    return torch.randint(0, 13, (4, 4), generator=torch.Generator().manual_seed(seed))


def get_inputs(step=0):
    return _ids(33 + step)


def get_targets(step=0):
    return _ids(63 + step)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, prepare):
    ids, targets = batch
    optimizer.zero_grad()
    value = loss(prepare(model(ids)), targets)
    value.backward()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda logits: logits.bfloat16())


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, lambda logits: logits)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["precision"],
        "stage": "loss",
        "tensors": ["head.weight", "token.weight"],
        "mentions": ["loss", "bfloat16"],
    },
    "good": {"verdict": "pass"},
}
