"""The total norm is taken over the first parameter group only, and only that group is clipped;
biases and norms in the second keep their full gradient. The twin clips what all groups hold.
Class: https://github.com/facebookresearch/fairscale/pull/1167
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MAX_NORM = 0.1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 5)
        self.norm = nn.LayerNorm(5)
        self.logits = nn.Linear(5, 6)
        nn.init.uniform_(self.norm.bias, -0.8, 0.8)

    def forward(self, ids):
        return self.logits(self.norm(self.embed(ids)).mean(1))


def get_inputs(step=0):
    return torch.randint(0, 8, (8, 3), generator=torch.Generator().manual_seed(9000 + step))


def get_targets(step=0):
    return torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(9100 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(model):
    decayed = [model.embed.weight, model.logits.weight]
    plain = [model.norm.weight, model.norm.bias, model.logits.bias]
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=2.0
    )


def _train(model, optimizer, batch, groups):
    ids, labels = batch
    optimizer.zero_grad()
    value = loss(model(ids), labels)
    value.backward()
    nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], MAX_NORM)
    optimizer.step()
    return value.detach()


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, optimizer.param_groups)


def _wrapped(model, mesh):
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    return ddp, get_optimizer(ddp.module)


setup_bad = setup_good = _wrapped


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, optimizer.param_groups[:1])


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, optimizer.param_groups)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["norm_clip"],
        "stage": "clipping",
        "tensors": ["norm.weight", "norm.bias", "logits.bias"],
        "mentions": ["norm.weight"],
    },
    "good": {"verdict": "pass"},
}
