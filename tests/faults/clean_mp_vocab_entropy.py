"""False-alarm trap: cross entropy on logits that stay cut by vocabulary, with ignored labels:
torch's `loss_parallel` and a hand-written form whose ranks hold uneven parts (eleven words on two
ranks). No rank ever sees all logits.
Compare https://github.com/apple/ml-cross-entropy/pull/42
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

VOCAB = 11


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB)

    def cost(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids, labels):
        return self.cost(self.head(F.mish(self.mid(self.embed(ids)))), labels)


def get_inputs(step=0):
    source = torch.Generator().manual_seed(5700 + step)
    ids = torch.randint(0, VOCAB, (3, 6), generator=source)
    labels = torch.randint(0, VOCAB, (3, 6), generator=source)
    labels[:, 4] = -100
    return {"ids": ids, "labels": labels}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.6, foreach=False)


def mesh_library():
    return {"tp": 2}


def parallelize_library(model, mesh):
    cut = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, {"head": cut})


def step_library(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    with loss_parallel():
        value = model(**batch)
        value.backward()
    optimizer.step()
    return value.detach().full_tensor()


class _Sum(torch.autograd.Function):
    """`forward` or `backward` tells where the ranks' values are summed."""

    @staticmethod
    def forward(ctx, x, group, where):
        ctx.group, ctx.where = group, where
        x = x.clone()
        if where == "forward":
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.where == "backward":
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


mesh_hand = mesh_library


def layout_hand():
    return {"head.*": [Shard(0)]}


def parallelize_hand(model, mesh):
    group, head = mesh.get_group("tp"), model.head
    first = 6 * group.rank()
    for name, p in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(p.detach().chunk(2)[group.rank()].clone()))

    def cost(logits, labels):
        top = logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = _Sum.apply((logits - top).exp().sum(-1), group, "forward")
        mine = (labels >= first) & (labels < first + logits.shape[-1])
        column = (labels - first).clamp(0, logits.shape[-1] - 1)
        picked = (logits - top).gather(-1, column[..., None])[..., 0] * mine
        per_token = total.log() - _Sum.apply(picked, group, "forward")
        return per_token[labels != -100].mean()

    head.forward = lambda h: F.linear(_Sum.apply(h, group, "backward"), head.weight, head.bias)
    model.cost = cost
    return model


EXPECT = {name: {"verdict": "pass"} for name in ("library", "hand")}
