"""ZeRO-2 by hand: all gradients in one flat buffer, reduce-scattered; each rank keeps and updates
its slice, then the slices are gathered. `bad_sum` never divides by the ranks; `bad_gather` gathers
before the update, so that weights are one step old.
Class: https://github.com/meta-pytorch/torchtune/issues/2641 (a factor of the ranks),
https://github.com/NVIDIA/Megatron-LM/issues/1446 (weights gathered at the wrong time)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3)

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


def get_inputs(step=0):
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(8100 + step))


def get_targets(step=0):
    return torch.randn(9, 3, generator=torch.Generator().manual_seed(8150 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def mesh_good():
    return {"dp": 3}


def _padded(tensors, ranks):
    flat = parameters_to_vector(tensors).detach()
    return F.pad(flat, (0, -len(flat) % ranks))


def setup_good(model, mesh):
    own = _padded(model.parameters(), mesh.size()).chunk(mesh.size())[mesh.get_local_rank()]
    return model, get_optimizer([nn.Parameter(own.clone())])


def _gather(model, own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    vector_to_parameters(torch.cat(parts), model.parameters())


def _train(model, optimizer, batch, mesh, divide_by, *, is_gathered_first=False):
    model.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    own = optimizer.param_groups[0]["params"][0]
    own.grad = torch.empty_like(own)
    flat = _padded([p.grad for p in model.parameters()], mesh.size())
    dist.reduce_scatter_tensor(own.grad, flat / divide_by)
    model.zero_grad()  # whole gradients are not kept
    if is_gathered_first:
        _gather(model, own)
    optimizer.step()
    if not is_gathered_first:
        _gather(model, own)
    return value.detach()


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, mesh.size())


def step_bad_sum(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, 1)


def step_bad_gather(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, mesh, mesh.size(), is_gathered_first=True)


mesh_bad_sum = mesh_bad_gather = mesh_good
setup_bad_sum = setup_bad_gather = setup_good

_FAULT = {
    "verdict": "mismatch",
    "stage": "parameters",
    "tensors": ["inner.weight", "inner.bias", "outer.weight", "outer.bias"],
}

EXPECT = {
    "bad_sum": _FAULT | {"kind": ["factor"], "mentions": ["3", "dp"]},
    "bad_gather": _FAULT | {"kind": ["stale"]},
    "good": {"verdict": "pass"},
}
