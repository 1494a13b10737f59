"""An adapter used by only some samples: ranks without them put zeros into the all-reduce and forget
to store the result, so their copy of the adapter stands still. The twin stores it.
Class: https://github.com/facebookresearch/fairscale/issues/605
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.adapters = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x, language):
        h = F.gelu(self.trunk(x))
        for i, adapter in enumerate(self.adapters):
            rows = language == i
            if rows.any():
                h = h + rows[:, None] * torch.tanh(adapter(h))
        return self.head(h)


def get_inputs(step=0):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(12400 + step))
    return x, torch.tensor([0, 0, 0, 0, 1, 0, 1, 1])  # rank 0 has no sample in language 1


def get_targets(step=0):
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(12500 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.7)


def parallelize_bad(model, mesh):
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, store):
    x, language, labels = batch
    optimizer.zero_grad()
    value = loss(model(x, language), labels)
    value.backward()
    for p in model.parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad, group=mesh.get_group("dp"))
        grad /= mesh.size()
        if store:
            p.grad = grad
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, store=False)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, store=True)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unused"],
        "stage": "gradients",
        "tensors": ["adapters.1.weight", "adapters.1.bias"],
        "mentions": ["adapters.1.weight", "rank 0"],
    },
    "good": {"verdict": "pass"},
}
