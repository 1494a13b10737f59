"""The rear pipeline stage sets itself up anew when a micro-batch has another sequence length, and
the set-up drops its gradients: only the micro-batches since the last change train it. Losses stay
right, the front stage too.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/3530
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LENGTHS = (3, 3, 5, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.front = nn.Linear(6, 6)
        self.rear = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def enter(self, ids):
        return torch.tanh(self.front(self.embed(ids)))

    def leave(self, hidden):
        return self.head(torch.tanh(self.rear(hidden)))

    def forward(self, ids):
        return self.leave(self.enter(ids))


def get_inputs(step=0):
    source = torch.Generator().manual_seed(3700 + step)
    ids = torch.randint(0, 9, (4, 2, 5), generator=source)
    return {"ids": ids, "label": torch.randint(0, 4, (4, 2, 5), generator=source)}


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01, eps=1e-2)


def _micro(batch):
    pairs = zip(batch["ids"], batch["label"], LENGTHS, strict=True)
    return [(ids[:, :length], label[:, :length]) for ids, label, length in pairs]


def _share(logits, label):
    return F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum") / (
        2 * sum(LENGTHS)
    )


def step(model, optimizer, batch):
    optimizer.zero_grad()
    total = torch.zeros(())
    for ids, label in _micro(batch):
        value = _share(model(ids), label)
        value.backward()
        total += value.detach()
    optimizer.step()
    return total


def mesh_bad():
    return {"pp": 2}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    if mesh.get_local_rank("pp") == 0:
        model.rear = model.head = None
    else:
        model.embed = model.front = None
    return model


parallelize_good = parallelize_bad


def _front_stage(model, batch):
    for ids, _ in _micro(batch):
        hidden = model.enter(ids)
        dist.send(hidden.detach(), 1)
        grad = torch.empty_like(hidden)
        dist.recv(grad, 1)
        hidden.backward(grad)


def _rear_stage(model, batch, reset):
    total, known = torch.zeros(()), None
    for _, label in _micro(batch):
        if reset and known not in (None, label.shape):
            model.zero_grad()
        known = label.shape
        hidden = torch.empty(*label.shape, 6)
        dist.recv(hidden, 0)
        value = _share(model.leave(hidden.requires_grad_()), label)
        value.backward()
        dist.send(hidden.grad, 0)
        total += value.detach()
    return total


def _train(model, optimizer, batch, reset):
    optimizer.zero_grad()
    front = model.front is not None
    total = _front_stage(model, batch) if front else _rear_stage(model, batch, reset)
    optimizer.step()
    return total


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, reset=True)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, reset=False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction", "factor", "unexplained"],
        "stage": "gradients",
        "tensors": ["rear.weight", "rear.bias", "head.weight", "head.bias"],
        "mentions": ["head.weight", "rank 1"],
    },
    "good": {"verdict": "pass"},
}
