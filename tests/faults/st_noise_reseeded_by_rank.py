"""Denoising step on three ranks: each adds its rank to the seed before it draws time and noise. The
ranks are independent now, yet none has the noise that one device gives these samples. The twin
draws for all samples and takes its own. Class: https://github.com/pytorch/pytorch/issues/168058
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _signal(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(8, 6)
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.last = nn.Conv1d(6, 2, 3, padding=1)

    def forward(self, noisy, t):
        return self.last(F.silu(self.conv(noisy) + self.time(t)[:, :, None]))


def get_inputs(step=0):
    return {"clean": _signal(3 + step, 6, 2, 8)}


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01, eps=1e-4)


def _train(model, optimizer, clean, t, noise):
    optimizer.zero_grad()
    share = (t.to(clean.dtype) / 8)[:, None, None]
    noise = noise.to(clean.dtype)
    value = F.mse_loss(model(share * clean + (1 - share) * noise, t), noise)
    value.backward()
    optimizer.step()
    return value.detach()


def _draw(samples, shape):
    return torch.randint(0, 8, (samples,)), torch.randn(samples, *shape, dtype=torch.float32)


def step(model, optimizer, batch):
    clean = batch["clean"]
    return _train(model, optimizer, clean, *_draw(clean.shape[0], clean.shape[1:]))


def mesh_bad():
    return {"dp": 3}


mesh_good = mesh_bad


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_bad(model, optimizer, batch, mesh):
    torch.manual_seed(torch.initial_seed() + mesh.get_local_rank("dp"))
    return step(model, optimizer, batch)


def step_good(model, optimizer, batch, mesh):
    clean, size, rank = batch["clean"], mesh.size(), mesh.get_local_rank("dp")
    drawn = _draw(clean.shape[0] * size, clean.shape[1:])
    t, noise = (part.chunk(size)[rank] for part in drawn)
    return _train(model, optimizer, clean, t, noise)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["random_stream", "inputs"],
        "stage": ["inputs", "module_outputs", "loss"],
        "tensors": ["conv.weight", "last.weight"],
        "mentions": ["random"],
    },
    "good": {"verdict": "pass"},
}
