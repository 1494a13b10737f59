"""Cross entropy over a vocabulary split by rank, by hand: the value and the head's rows are right,
but the gradient of the hidden state covers this rank's part of the vocabulary and `bad` never sums
it, so all below the head is partial.
Class: https://github.com/apple/ml-cross-entropy/pull/42
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard

VOCAB, WIDTH = 12, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def entropy(self, hidden, labels):
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        return self.entropy(torch.tanh(self.mid(self.embed(ids))), labels)


def get_inputs(step=0):
    source = torch.Generator().manual_seed(700 + step)
    ids = torch.randint(0, VOCAB, (3, 7), generator=source)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def _reduced(x, group, op=dist.ReduceOp.SUM):
    x = x.contiguous().clone()
    dist.all_reduce(x, op, group=group)
    return x


class _VocabEntropy(torch.autograd.Function):
    """Mean cross entropy of logits cut by vocabulary; backward gives each rank its own share."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, group):
        logits = hidden @ weight.t()
        top = _reduced(logits.amax(-1), group, dist.ReduceOp.MAX)
        exponent = (logits - top[..., None]).exp()
        probs = exponent / _reduced(exponent.sum(-1), group)[..., None]
        rows = labels - group.rank() * weight.shape[0]
        mine = (rows >= 0) & (rows < weight.shape[0])
        rows = rows.clamp(0, weight.shape[0] - 1)
        picked = _reduced(probs.gather(-1, rows[..., None])[..., 0] * mine, group)
        target = F.one_hot(rows, weight.shape[0]) * mine[..., None]
        ctx.save_for_backward(hidden, weight, (probs - target) / labels.numel())
        return -picked.log().mean()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, delta = ctx.saved_tensors
        delta = grad * delta
        return delta @ weight, delta.flatten(0, 1).t() @ hidden.flatten(0, 1), None, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _reduced(grad, ctx.group), None


def mesh_bad():
    return {"tp": 3}


def layout_bad():
    return {"head.weight": [Shard(0)]}


mesh_good, layout_good = mesh_bad, layout_bad


def _parallelize(model, mesh, enter):
    group, head = mesh.get_group("tp"), model.head
    rows = head.weight.detach().chunk(group.size(), 0)[group.rank()]
    head.weight = nn.Parameter(rows.clone())

    def entropy(hidden, labels):
        return _VocabEntropy.apply(enter(hidden, group), head.weight, labels, group)

    model.entropy = entropy
    return model


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, lambda hidden, group: hidden)


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, _SumBackward.apply)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": "gradients",
        "tensors": ["embed.weight", "mid.weight", "mid.bias"],
        "mentions": ["mid.weight", "tp"],
    },
    "good": {"verdict": "pass"},
}
