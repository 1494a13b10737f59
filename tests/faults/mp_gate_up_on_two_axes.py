"""Gate and up stored per rank as (its gate, its up) on a dp x tp mesh, which is right and puts the
columns of that output in another order on every rank. `bad` adds the bias of the layer behind it
on both tp ranks. The twin adds it once.
Class: https://github.com/NVIDIA/Megatron-LM/issues/673 (a bias counted tp times), a storage
order as false-alarm trap
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.gate_up = nn.Linear(6, 16)
        self.down = nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        h = self.inp(x)
        gate, up = self.gate_up(h).chunk(2, -1)
        return self.out(h + self.down(F.silu(gate) * up))


def get_inputs(step=0):
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(9600 + step))


def get_targets(step=0):
    return torch.randn(6, 3, 3, generator=torch.Generator().manual_seed(9630 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def mesh_good():
    return {"dp": 2, "tp": 2}


mesh_bad = mesh_good


def _parallelize(model, mesh, bias_inside):
    rank, group = mesh.get_local_rank("tp"), mesh.get_group("tp")
    fused, down = model.gate_up, model.down

    def own(tensor):
        return torch.cat([half.chunk(2)[rank] for half in tensor.detach().chunk(2)])

    fused.weight, fused.bias = nn.Parameter(own(fused.weight)), nn.Parameter(own(fused.bias))
    down.weight = nn.Parameter(down.weight.detach().chunk(2, 1)[rank].clone())
    fused.forward = lambda x: F.linear(_Enter.apply(x, group), fused.weight, fused.bias)
    if bias_inside:
        down.forward = lambda x: _Leave.apply(F.linear(x, down.weight, down.bias), group)
    else:
        down.forward = lambda x: _Leave.apply(F.linear(x, down.weight), group) + down.bias
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: (dist.all_reduce(p.grad, group=mesh.get_group("dp")), p.grad.div_(2), None)[2]
        )
    return model


def parallelize_good(model, mesh):
    return _parallelize(model, mesh, False)


def parallelize_bad(model, mesh):
    return _parallelize(model, mesh, True)


def gather_good(name, local_tensors):
    if not name.startswith("gate_up"):
        return None
    halves = [tensor.chunk(2) for tensor in local_tensors[:2]]
    return torch.cat([part for side in zip(*halves, strict=True) for part in side])


gather_bad = gather_good

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["additive"],
        "stage": "module_outputs",
        "tensors": ["down", "down.bias"],
        "mentions": ["down.bias", "tp"],
        "never": ["another order"],
    },
    "good": {"verdict": "pass"},
}
