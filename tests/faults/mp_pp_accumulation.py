"""GPipe schedule, two `schedule.step` calls per optimizer step. `bad_scaled`: with the default
`scale_grads` each call divides ALL gradients gathered so far by its micro-batch count, so the first
call's are divided twice. `bad_summed`: scaling switched off and nobody divides. The twins scale
once, after the last call.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/3530 (pipelines with gradient accumulation)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

CALLS, MICRO = 2, 4
LAYERS = ("front.0", "rear.0", "rear.2")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.rear = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.rear(self.front(x))


def get_inputs(step=0):
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(3400 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(3430 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)


def mesh_bad_scaled():
    return {"pp": 2}


mesh_bad_summed = mesh_good_scaled = mesh_good_summed = mesh_bad_scaled


def _pipeline(model, mesh, scale_grads):
    rank = mesh.get_local_rank("pp")
    if rank == 0:
        model.rear = None
    else:
        model.front = None
    part = model.front if rank == 0 else model.rear
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    model.schedule = ScheduleGPipe(stage, MICRO, loss_fn=loss, scale_grads=scale_grads)
    return model


def parallelize_bad_scaled(model, mesh):
    return _pipeline(model, mesh, scale_grads=True)


def parallelize_bad_summed(model, mesh):
    return _pipeline(model, mesh, scale_grads=False)


parallelize_good_scaled = parallelize_good_summed = parallelize_bad_summed


def _train(model, optimizer, batch, divisor):
    optimizer.zero_grad()
    total = []
    for x, y in zip(batch[0].chunk(CALLS), batch[1].chunk(CALLS), strict=True):
        if model.front is not None:
            model.schedule.step(x)
        else:
            losses = []
            model.schedule.step(target=y, losses=losses)
            total += losses
    for p in model.parameters():
        p.grad.div_(divisor)
    optimizer.step()
    return torch.stack(total).mean().detach() if model.front is None else None


def step_bad_scaled(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, CALLS)


def step_bad_summed(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, 1)


def step_good_scaled(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, CALLS * MICRO)


step_good_summed = step_good_scaled


def _fault(kinds, mentions):
    return {
        "verdict": "mismatch",
        "kind": kinds,
        "stage": "gradients",
        "tensors": [
            f"{n}.{p}" for n in ("front.0", "rear.0", "rear.2") for p in ("weight", "bias")
        ],
        "mentions": mentions,
    }


EXPECT = {
    "bad_scaled": _fault(
        ["factor"], ["rear.2.weight", "0-3 0.2500 x, 4-7 1.0000", "each of the 2 calls"]
    ),
    "good_scaled": {"verdict": "pass"},
    "bad_summed": _fault(["factor"], ["rear.2.weight", "8"]),
    "good_summed": {"verdict": "pass"},
}
