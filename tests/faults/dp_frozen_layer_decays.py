"""To keep collectives aligned, missing gradients are filled with zeros before the reduction - those
of the frozen layer too, which AdamW then decays. The twin leaves frozen parameters out.
Class: https://github.com/facebookresearch/fairscale/pull/721
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3, stride=2).requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, image):
        return self.head(torch.relu(self.features(image)).flatten(1))


def get_inputs(step=0):
    return torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(12800 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(12900 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.2)


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, reduced):
    image, labels = batch
    optimizer.zero_grad()
    value = loss(model(image), labels)
    value.backward()
    for p in reduced:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, model.parameters())


def step_good(model, optimizer, batch, mesh):
    trained = [p for p in model.parameters() if p.requires_grad]
    return _train(model, optimizer, batch, mesh, trained)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused"],
        "stage": ["gradients", "optimizer_state", "parameters"],  # a zero where there was none
        "tensors": ["features.weight", "features.bias"],
        "mentions": ["features.weight"],
    },
    "good": {"verdict": "pass"},
}
