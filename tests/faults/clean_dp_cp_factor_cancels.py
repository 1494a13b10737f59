"""False-alarm trap: sequences are cut over cp and the loss is multiplied by the size of cp, which
looks like a fault and cancels the later average over dp and cp.
Compare https://github.com/NVIDIA/Megatron-LM/issues/673
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.hidden = nn.Linear(6, 10)
        self.logits = nn.Linear(10, 8)

    def forward(self, ids):  # token by token: nothing crosses the cut
        return self.logits(F.silu(self.hidden(self.words(ids))))


def get_inputs(step=0):
    g = torch.Generator().manual_seed(15400 + step)
    return {"ids": torch.randint(0, 8, (4, 6), generator=g)}


def get_targets(step=0):
    return torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(15500 + step))


def loss(output, targets):
    return F.cross_entropy(output.mT, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def mesh_multiplied():
    return {"dp": 2, "cp": 2}


def input_sharding_multiplied():
    return {"ids": {"dp": 0, "cp": 1}, "targets": {"dp": 0, "cp": 1}}


def parallelize_multiplied(model, mesh):
    return model


mesh_plain, input_sharding_plain = mesh_multiplied, input_sharding_multiplied
parallelize_plain = parallelize_multiplied


def _train(model, optimizer, batch, mesh, factor, divide_by):
    dp, cp = mesh.get_group("dp"), mesh.get_group("cp")
    tokens = batch["targets"].numel() * cp.size()  # of this dp rank's whole sequences
    optimizer.zero_grad()
    value = F.cross_entropy(model(batch["ids"]).mT, batch["targets"], reduction="sum") / tokens
    (value * factor).backward()
    for p in model.parameters():
        for group in (cp, dp):
            dist.all_reduce(p.grad, group=group)
        p.grad /= divide_by
    optimizer.step()
    value = value.detach().clone()
    dist.all_reduce(value, group=cp)
    return value


def step_multiplied(model, optimizer, batch, mesh):
    size = mesh["cp"].size()
    return _train(model, optimizer, batch, mesh, size, mesh["dp"].size() * size)


def step_plain(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1, mesh["dp"].size())


EXPECT = {"multiplied": {"verdict": "pass"}, "plain": {"verdict": "pass"}}
