"""False-alarm trap: torch's 1F1B schedule on three stages with equal micro-batches. Gradients add
up over micro-batches in another order, the loss is known on the last stage only, and a tied-looking
pair of weights is not tied.
Compare https://github.com/pytorch/torchtitan/pull/4711
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICRO = 6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            [
                nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 5)),
                nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh()),
                nn.Linear(5, 8, bias=False),
            ]
        )
        self.parts[2].weight.data.copy_(self.parts[0][0].weight.data)  # equal at first, not tied

    def forward(self, ids):
        for part in self.parts:
            ids = part(ids)
        return ids


def get_inputs(step=0):
    return torch.randint(0, 8, (12, 4), generator=torch.Generator().manual_seed(6000 + step))


def get_targets(step=0):
    return torch.randint(0, 8, (12, 4), generator=torch.Generator().manual_seed(6030 + step))


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.9)


def mesh_schedule():
    return {"pp": 3}


def parallelize_schedule(model, mesh):
    rank = mesh.get_local_rank("pp")
    for number in range(3):
        if number != rank:
            model.parts[number] = None
    stage = PipelineStage(
        model.parts[rank], rank, 3, torch.device("cpu"), group=mesh.get_group("pp")
    )
    model.schedule = Schedule1F1B(stage, MICRO, loss_fn=loss)
    return model


def step_schedule(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    rank, losses = mesh.get_local_rank("pp"), []
    if rank == 0:
        model.schedule.step(batch[0])
    elif rank == 1:
        model.schedule.step()
    else:
        model.schedule.step(target=batch[1], losses=losses)
    optimizer.step()
    return torch.stack(losses).mean().detach() if rank == 2 else None


EXPECT = {"schedule": {"verdict": "pass"}}
