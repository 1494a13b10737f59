"""Experts spread over ranks, tokens sent by all-to-all. Each rank's loss is a mean over its own
tokens; dense gradients are averaged over ep, expert gradients already hold all ranks' tokens and
miss the 1/ep.
Class: https://github.com/databricks/megablocks/pull/20
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.router = nn.Linear(4, 5), nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)
        nn.init.normal_(self.router.weight, std=2.0)

    def mixture(self, h, weight, choice):
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            out = out.index_add(0, rows, torch.tanh(expert(h[rows])) * weight[rows])
        return out

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        weight, choice = self.router(h).softmax(-1).max(-1)
        return self.head(h + self.mixture(h, weight[:, None], choice))


def get_inputs(step=0):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1600 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(1630 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


def mesh_bad():
    return {"ep": 2}


mesh_good = mesh_bad


def input_sharding_bad():
    return {"x": {"ep": 0}, "targets": {"ep": 0}}


input_sharding_good = input_sharding_bad


def parallelize_bad(model, mesh):
    group, rank = mesh.get_group("ep"), mesh.get_local_rank("ep")
    for number in range(4):
        if number // 2 != rank:
            model.experts[number] = None

    def mixture(h, weight, choice):
        order = choice.argsort(stable=True)
        sent = torch.bincount(choice // 2, minlength=2)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sent, received = sent.tolist(), received.tolist()
        arrived = _Exchange.apply(h[order], sent, received, group)
        owner = choice.new_empty(sum(received))
        dist.all_to_all_single(owner, choice[order], received, sent, group=group)
        out = torch.zeros_like(arrived)
        for number in (2 * rank, 2 * rank + 1):
            rows = (owner == number).nonzero()[:, 0]
            out = out.index_add(0, rows, torch.tanh(model.experts[number](arrived[rows])))
        back = _Exchange.apply(out, received, sent, group)
        return torch.zeros_like(h).index_add(0, order, back) * weight

    model.mixture = mixture
    return model


parallelize_good = parallelize_bad


def _train(model, optimizer, batch, mesh, expert_divisor):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for name, p in model.named_parameters():
        if name.startswith("experts"):
            p.grad.div_(expert_divisor)
        else:
            dist.all_reduce(p.grad)
            p.grad.div_(mesh.size())
    optimizer.step()
    dist.all_reduce(value.detach())
    return value.detach() / mesh.size()


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, mesh.size())


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": [f"experts.{n}.{part}" for n in range(3) for part in ("weight", "bias")],
        "mentions": ["experts.0.weight", "2", "ep"],
    },
    "good": {"verdict": "pass"},
}
