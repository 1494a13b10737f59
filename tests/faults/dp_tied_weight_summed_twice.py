"""The reduction loops over every module's own parameters; embedding and output layer share one
weight, so its gradient is summed twice, all others once. The twin lists each parameter once.
Class: https://github.com/deepspeedai/DeepSpeed/issues/966
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.mix = nn.LSTM(6, 6, batch_first=True)
        self.logits = nn.Linear(6, 10)
        self.logits.weight = self.words.weight

    def forward(self, ids):
        return self.logits(self.mix(self.words(ids))[0])


def get_inputs(step=0):
    return torch.randint(0, 10, (6, 5), generator=torch.Generator().manual_seed(8200 + step))


def get_targets(step=0):
    return torch.randint(0, 10, (6, 5), generator=torch.Generator().manual_seed(8300 + step))


def loss(output, targets):
    return F.cross_entropy(output.mT, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, parameters):
    ids, labels = batch
    optimizer.zero_grad()
    value = loss(model(ids), labels) / mesh.size()
    value.backward()
    for p in parameters:
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    listed = [p for module in model.modules() for p in module.parameters(recurse=False)]
    return _train(model, optimizer, batch, mesh, listed)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, model.parameters())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["double_reduction", "factor", "tied"],
        "stage": "gradients",
        "tensors": ["words.weight"],
        "mentions": ["words.weight", "2"],
    },
    "good": {"verdict": "pass"},
}
