"""Contrastive loss over image/text pairs. `local` compares with the rank's own batch only;
`detached` gathers all features without gradient and puts its own back, which loses the share of the
others' rows. The twins gather with gradient.
Class: https://github.com/3dlg-hcvc/DuoduoCLIP/issues/10 and https://github.com/HobbitLong/SupContrast/issues/26
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.text = nn.EmbeddingBag(12, 4, mode="mean")
        self.log_scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, pixels, words):
        u, v = F.normalize(self.image(pixels), dim=-1), F.normalize(self.text(words), dim=-1)
        return u, v, self.log_scale.exp()


def get_inputs(step=0):
    g = torch.Generator().manual_seed(11000 + step)
    words = torch.randint(0, 12, (8, 3), generator=g)
    return {"pixels": torch.randn(8, 6, generator=g), "words": words}


def loss(output):
    u, v, scale = output
    logits = scale * u @ v.T
    matching = torch.arange(len(u))
    return (F.cross_entropy(logits, matching) + F.cross_entropy(logits.T, matching)) / 2


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def parallelize_bad_local(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good_local = parallelize_bad_local
parallelize_bad_detached = parallelize_good_detached = parallelize_bad_local


def _train(model, optimizer, batch, gather):
    optimizer.zero_grad()
    u, v, scale = model(**batch)
    value = loss((gather(u), gather(v), scale))
    value.backward()
    optimizer.step()
    return value.detach()


def step_bad_detached(model, optimizer, batch, mesh):
    def gather(features):
        parts = [torch.empty_like(features) for _ in range(mesh.size())]
        dist.all_gather(parts, features.detach(), group=mesh.get_group("dp"))
        parts[mesh.get_local_rank("dp")] = features
        return torch.cat(parts)

    return _train(model, optimizer, batch, gather)


def step_good_detached(model, optimizer, batch, mesh):
    def gather(features):
        return torch.cat(dist_nn.all_gather(features, group=mesh.get_group("dp")))

    return _train(model, optimizer, batch, gather)  # backward sums over ranks, DDP averages


step_good_local = step_good_detached

EXPECT = {
    "bad_local": {
        "verdict": "mismatch",
        "kind": ["cross_sample"],
        "stage": "loss",
        "tensors": ["image.0.weight", "image.2.weight", "text.weight", "log_scale"],
        "mentions": ["dp"],
    },
    "good_local": {"verdict": "pass"},
    "bad_detached": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["image.0.weight", "image.2.weight", "text.weight"],
        "mentions": ["0.5", "text.weight"],
    },
    "good_detached": {"verdict": "pass"},
}
