"""Each rank takes its own part of the batch; the labels' start is computed with a stride of n + 1,
so every rank but the first trains on its neighbours' labels. The twin cuts both alike.
Class: https://github.com/huggingface/sentence-transformers/issues/3415 (prove equal batches first)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x, wanted):
        return F.mse_loss(self.out(torch.relu(self.mix(x))), wanted)


def get_inputs(step=0):
    g = torch.Generator().manual_seed(13200 + step)
    return {"x": torch.randn(9, 5, generator=g), "wanted": torch.randn(9, 4, generator=g)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


def mesh_bad():
    return {"dp": 3}


def input_sharding_bad():
    return {"x": {"dp": None}, "wanted": {"dp": None}}  # the step takes its own part


def parallelize_bad(model, mesh):
    return model


mesh_good, input_sharding_good, parallelize_good = mesh_bad, input_sharding_bad, parallelize_bad


def _train(model, optimizer, batch, mesh, extra):
    rank, total = mesh.get_local_rank("dp"), batch["x"].shape[0]
    n = total // mesh.size()
    rows = torch.arange(rank * n, rank * n + n)
    optimizer.zero_grad()
    value = model(batch["x"][rows], batch["wanted"][(rows + rank * extra) % total])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 0)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["inputs"],
        "stage": "inputs",
        "tensors": ["mix.weight", "mix.bias", "out.weight", "out.bias"],
        "mentions": ["wanted"],
    },
    "good": {"verdict": "pass"},
}
