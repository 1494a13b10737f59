"""Sharded update of weights. `bad_master` keeps this rank's master copy in bfloat16, so most of an
update is rounded away; `bad_gather` sends the new rows as float16. The twin does neither.
Class: https://github.com/NVIDIA/Megatron-LM/issues/5974 (smaller step from equal gradients)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.gain = nn.RMSNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x, y):
        return F.mse_loss(self.out(self.gain(F.silu(self.inp(x)))), y)


def get_inputs(step=0):
    return {"x": _normal(23 + step, 8, 6), "y": _normal(83 + step, 8, 4)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.03)


def _setup(model, mesh, master_type):
    rank, size = mesh.get_local_rank("dp"), mesh.size()
    rows = [p.detach().chunk(size)[rank].clone() for p in model.parameters()]
    masters = [nn.Parameter(r if master_type is None else r.to(master_type)) for r in rows]
    return model, get_optimizer(masters)


def setup_bad_master(model, mesh):
    return _setup(model, mesh, torch.bfloat16)


def setup_bad_gather(model, mesh):
    return _setup(model, mesh, None)


setup_good = setup_bad_gather


def _train(model, optimizer, batch, mesh, wire_type):
    rank, size, group = mesh.get_local_rank("dp"), mesh.size(), mesh.get_group("dp")
    model.zero_grad()
    value = model(**batch)
    value.backward()
    masters = optimizer.param_groups[0]["params"]
    for p, master in zip(model.parameters(), masters, strict=True):
        dist.all_reduce(p.grad.div_(size), group=group)
        master.grad = p.grad.chunk(size)[rank].to(master.dtype, copy=True)
    optimizer.step()
    for p, master in zip(model.parameters(), masters, strict=True):
        mine = master.detach().to(wire_type or p.dtype)
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=group)
        p.data.copy_(torch.cat(parts))
    return value.detach()


def step_bad_master(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, None)


def step_bad_gather(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, torch.float16)


step_good = step_bad_master


def _fault(dtype):
    return {
        "verdict": "mismatch",
        "kind": ["precision"],
        "stage": "parameters",
        "tensors": ["inp.weight", "out.weight"],
        "mentions": ["inp.weight", dtype],
    }


EXPECT = {
    "bad_master": _fault("bfloat16"),
    "bad_gather": _fault("float16"),
    "good": {"verdict": "pass"},
}
