"""As mp_pp_accumulation, and the second call's samples are those of the first: all gradients are
0.625 x the reference, (1 + 1/4) / 2 of 2 calls of 4 micro-batches.
Class: https://github.com/NVIDIA-NeMo/Automodel/pull/3530 (pipelines with gradient accumulation)
"""

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

CALLS, MICRO = 2, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.rear = nn.Linear(7, 3)

    def forward(self, x):
        return self.rear(self.front(x))


def get_inputs(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(3500 + step)).repeat(2, 1)


def get_targets(step=0):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(3530 + step)).repeat(2, 1)


def loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2)


def mesh_bad():
    return {"pp": 2}


mesh_good = mesh_bad


def _pipeline(model, mesh, scale_grads):
    rank = mesh.get_local_rank("pp")
    model.front, model.rear = (model.front, None) if rank == 0 else (None, model.rear)
    stage = PipelineStage(
        model.rear if rank else model.front, rank, 2, torch.device("cpu"), group=mesh.get_group()
    )
    model.schedule = ScheduleGPipe(stage, MICRO, loss_fn=loss, scale_grads=scale_grads)
    return model


def parallelize_bad(model, mesh):
    return _pipeline(model, mesh, scale_grads=True)


def parallelize_good(model, mesh):
    return _pipeline(model, mesh, scale_grads=False)


def _train(model, optimizer, batch, divisor):
    optimizer.zero_grad()
    losses = []
    for x, y in zip(batch[0].chunk(CALLS), batch[1].chunk(CALLS), strict=True):
        if model.front is not None:
            model.schedule.step(x)
        else:
            mine = []
            model.schedule.step(target=y, losses=mine)
            losses += mine
    for p in model.parameters():
        p.grad.div_(divisor)
    optimizer.step()
    return torch.stack(losses).mean().detach() if losses else None


def step_bad(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, CALLS)


def step_good(model, optimizer, batch, mesh):
    return _train(model, optimizer, batch, CALLS * MICRO)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["factor"],
        "stage": "gradients",
        "tensors": ["front.0.weight", "front.0.bias", "rear.weight", "rear.bias"],
        "mentions": ["0.6250", "each of the 2 calls of the schedule", "4 micro-batches"],
    },
    "good": {"verdict": "pass"},
}
