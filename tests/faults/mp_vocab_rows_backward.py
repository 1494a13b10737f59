"""Vocabulary-parallel embedding whose output is handed out by sequence over the same axis. Its
hand-written backward puts this rank's tokens into zeros and forgets to collect the others': each
row lacks the gradient of foreign tokens.
Class: https://github.com/openxla/xla/issues/42481 (slice and all-reduce in the wrong order in a
lookup's backward)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

VOCAB = 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.mid = nn.Linear(6, 6)
        self.score = nn.Linear(6, 3)

    def tokens(self, ids):
        return self.embed(ids)

    def forward(self, ids, label):
        logits = self.score(F.relu(self.mid(self.tokens(ids))))
        return F.cross_entropy(logits.flatten(0, 1), label.flatten())


def get_inputs(step=0):
    source = torch.Generator().manual_seed(800 + step)
    return {
        "ids": torch.randint(0, VOCAB, (4, 6), generator=source),
        "label": torch.randint(0, 3, (4, 6), generator=source),
    }


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.03, eps=1e-3)


class _SumThenOwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group, collect):
        ctx.group, ctx.collect, ctx.shape = group, collect, partial.shape
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.shape)
        whole.chunk(ctx.group.size(), 1)[ctx.group.rank()].copy_(grad)
        if ctx.collect:
            dist.all_reduce(whole, group=ctx.group)
        return whole, None, None


def mesh_bad():
    return {"tp": 2}


def layout_bad():
    return {"embed.weight": [Shard(0)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, collect):
    group, embed = mesh.get_group("tp"), model.embed
    per_rank = VOCAB // group.size()
    rows = embed.weight.detach().chunk(group.size(), 0)[group.rank()]
    embed.weight = nn.Parameter(rows.clone())

    def tokens(ids):
        local = ids - group.rank() * per_rank
        mine = (local >= 0) & (local < per_rank)
        found = F.embedding(local.clamp(0, per_rank - 1), embed.weight) * mine[..., None]
        return _SumThenOwnTokens.apply(found, group, collect)

    model.tokens = tokens
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, collect=False)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, collect=True)


def step_bad(model, optimizer, batch, mesh):
    group = mesh.get_group("tp")
    own_label = batch["label"].chunk(group.size(), 1)[group.rank()]
    optimizer.zero_grad()
    loss = model(batch["ids"], own_label) / group.size()
    loss.backward()
    for layer in (model.mid, model.score):
        for p in layer.parameters():
            dist.all_reduce(p.grad, group=group)
    optimizer.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss


step_good = step_bad

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction", "position", "unexplained"],
        "stage": "gradients",
        "tensors": ["embed.weight"],
        "mentions": ["embed.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
