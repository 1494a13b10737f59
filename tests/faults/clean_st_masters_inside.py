"""False-alarm trap: the style trains master copies that it keeps itself and writes them back to the
model after every step; the model's parameters are never seen by the optimizer. It is right.
Compare https://github.com/NVIDIA/Megatron-LM/issues/5974 (masters and model copies)
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
        self.key = nn.Linear(5, 6, bias=False)
        self.query = nn.Linear(5, 6)
        self.out = nn.Linear(5, 4)

    def forward(self, x, y):
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / 2).softmax(-1)
        return F.mse_loss(self.out(weights @ x), y)


def get_inputs(step=0):
    return {"x": _normal(501 + step, 8, 3, 5), "y": _normal(601 + step, 8, 3, 4)}


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.7, nesterov=True)


def mesh_masters():
    return {"dp": 4}


def setup_masters(model, mesh):
    def master(p):
        wide = torch.promote_types(p.dtype, torch.float32)
        return nn.Parameter(p.detach().to(wide, copy=True))

    return model, get_optimizer([master(p) for p in model.parameters()])


def step_masters(model, optimizer, batch, mesh):
    model.zero_grad()
    value = model(**batch)
    value.backward()
    masters = optimizer.param_groups[0]["params"]
    for p, master in zip(model.parameters(), masters, strict=True):
        dist.all_reduce(p.grad.div_(mesh.size()), group=mesh.get_group("dp"))
        master.grad = p.grad.to(master.dtype, copy=True)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
    return value.detach()


EXPECT = {"masters": {"verdict": "pass"}}
