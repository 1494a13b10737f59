"""False-alarm trap: context parallelism in zig-zag order. The sequence is cut into four pieces,
rank 0 takes pieces 0 and 3, rank 1 pieces 1 and 2, and positions and mask follow. No output is a
contiguous part of the reference's.
Compare https://github.com/pytorch/pytorch/issues/141429
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.place = nn.Embedding(8, 6)
        self.query = nn.Linear(6, 6)
        self.keyvalue = nn.Linear(6, 12, bias=False)
        self.head = nn.Linear(6, 9)

    def whole(self, tokens):
        return tokens

    def forward(self, ids, label, rows):
        x = self.embed(ids) + self.place(rows)
        k, v = self.whole(self.keyvalue(x)).chunk(2, -1)
        mask = self.whole(rows)[:, None] <= rows[..., None]
        mixed = F.scaled_dot_product_attention(self.query(x), k, v, attn_mask=mask)
        return F.cross_entropy(self.head(x + mixed).flatten(0, 1), label.flatten())


def get_inputs(step=0):
    source = torch.Generator().manual_seed(5300 + step)
    return {
        "ids": torch.randint(0, 9, (3, 8), generator=source),
        "label": torch.randint(0, 9, (3, 8), generator=source),
        "rows": torch.arange(8).repeat(3, 1),
    }


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


def mesh_zigzag():
    return {"cp": 2}


def parallelize_zigzag(model, mesh):
    model.whole = lambda tokens: _Whole.apply(tokens, mesh.get_group("cp"))
    return model


def step_zigzag(model, optimizer, batch, mesh):
    rank = mesh.get_local_rank("cp")
    own = {}
    for name, value in batch.items():
        pieces = value.chunk(4, 1)
        own[name] = torch.cat([pieces[rank], pieces[3 - rank]], 1)
    optimizer.zero_grad()
    value = model(**own)
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("cp"))
        tensor.div_(2)
    optimizer.step()
    return value


EXPECT = {"zigzag": {"verdict": "pass"}}
