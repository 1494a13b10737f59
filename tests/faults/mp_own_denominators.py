"""A loss that is whole on every rank of tp, divided by a count of labels that is not: each rank
counts those of its own part of the vocabulary (`bad_own`). `bad_twice` divides what is reduced
already by the ranks. The twin counts all labels.
Class: https://github.com/NVIDIA/Megatron-LM/pull/3768 (strength that varies with tp)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6, bias=False))
        self.out = nn.Linear(6, 12)

    def forward(self, ids):
        h = self.rnn(self.table(ids))[0]
        return self.out(h + self.mlp(h))


def get_inputs(step=0):
    return torch.randint(0, 12, (3, 8), generator=torch.Generator().manual_seed(9700 + step))


def get_targets(step=0):
    return torch.arange(24).view(3, 8) % 7 + torch.tensor([[0], [3], [0]])


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


def mesh_good():
    return {"tp": 2}


mesh_bad_own = mesh_bad_twice = mesh_good


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def parallelize_good(model, mesh, *, divide_by=1):
    up, _, down = model.mlp
    rank = mesh.get_local_rank()
    up.weight = nn.Parameter(up.weight.detach().chunk(2)[rank].clone())
    up.bias = nn.Parameter(up.bias.detach().chunk(2)[rank].clone())
    down.weight = nn.Parameter(down.weight.detach().chunk(2, 1)[rank].clone())
    model.mlp.register_forward_pre_hook(lambda _, args: (_Enter.apply(args[0]),))
    model.mlp.register_forward_hook(lambda _, args, out: _Leave.apply(out) / divide_by)
    return model


parallelize_bad_own = parallelize_good


def parallelize_bad_twice(model, mesh):
    return parallelize_good(model, mesh, divide_by=mesh.size())


def step_bad_own(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    ids, labels = batch
    count = int((labels // 6 == mesh.get_local_rank()).sum())
    value = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / count
    value.backward()
    optimizer.step()
    return value.detach()


EXPECT = {
    "bad_own": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["loss", "out.weight"],
        "mentions": ["rank 0", "rank 1", "counted alone"],
    },
    "bad_twice": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "module_outputs",
        "tensors": ["mlp"],
        "mentions": ["0.5000", "tp"],
        "never": ["all-reduce"],
    },
    "good": {"verdict": "pass"},
}
