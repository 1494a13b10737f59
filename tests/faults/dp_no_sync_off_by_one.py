"""The test for the last micro-batch is off by one (`i < n` with i counted from zero), so no_sync is
on for all of them and nothing is reduced. The twin leaves it on the last one.
Class: https://github.com/huggingface/picotron/pull/5
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)
        for p in self.block.parameters():
            if p.dim() == 1:
                nn.init.uniform_(p, 0.1, 0.9)

    def forward(self, image):
        patches = self.patch(image).flatten(2).transpose(1, 2)
        return self.head(self.block(patches).mean(1))


def get_inputs(step=0):
    return {"image": torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(6800 + step))}


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(6900 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, last):
    optimizer.zero_grad()
    images, labels = batch["image"].chunk(MICRO_BATCHES), batch["targets"].chunk(MICRO_BATCHES)
    reported = 0.0
    for i in range(MICRO_BATCHES):
        model.require_backward_grad_sync = not i < last  # what no_sync() sets
        value = loss(model(images[i]), labels[i]) / MICRO_BATCHES
        value.backward()
        reported = reported + value.detach()
    optimizer.step()
    return reported


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, MICRO_BATCHES)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, MICRO_BATCHES - 1)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["no_sync"],
        "stage": "gradients",
        "tensors": ["patch.weight", "block.linear1.weight", "head.weight", "head.bias"],
        "mentions": ["dp"],
    },
    "good": {"verdict": "pass"},
}
