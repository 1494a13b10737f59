"""False-alarm traps beside DDP: `again` averages what is averaged already, which changes nothing;
`weights` averages the parameters after the step as well; `unused` has a layer that nobody uses.
Compare https://github.com/NVIDIA/nccl/issues/446
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 7)
        self.spare = nn.Linear(7, 7)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(F.softplus(self.used(x)))


def get_inputs(step=0):
    return {"x": torch.randn(9, 5, generator=torch.Generator().manual_seed(16600 + step))}


def get_targets(step=0):
    return torch.randint(0, 3, (9,), generator=torch.Generator().manual_seed(16700 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.9, weight_decay=0.1)


def mesh_again():
    return {"dp": 3}


def parallelize_again(model, mesh):
    return DistributedDataParallel(
        model, process_group=mesh.get_group("dp"), find_unused_parameters=True
    )


mesh_weights = mesh_unused = mesh_again
parallelize_weights = parallelize_unused = parallelize_again


def _average(tensor, mesh):
    dist.all_reduce(tensor, group=mesh.get_group("dp"))
    tensor /= mesh.size()


def _backward(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch["x"]), batch["targets"])
    value.backward()
    return value.detach()


def step_again(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    for p in model.parameters():
        if p.grad is not None:
            _average(p.grad, mesh)
    optimizer.step()
    return value


def step_weights(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    optimizer.step()
    for p in model.parameters():
        _average(p.data, mesh)
    return value


EXPECT = {name: {"verdict": "pass"} for name in ("again", "weights", "unused")}
