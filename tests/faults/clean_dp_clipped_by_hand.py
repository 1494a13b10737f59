"""False-alarm trap: one device clips by torch's function, the ranks by hand. Their gradients are
read after it, and the learning rate is too small for the parameters to tell that they were clipped:
in every step they are those of one device after clipping.
"""

import torch
import torch.distributed as dist
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def get_inputs(step=0):
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(2600 + step))]


def get_targets(step=0):
    return 3.0 * torch.randn(8, 4, generator=torch.Generator().manual_seed(2650 + step))


def loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=1e-7)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return value.detach()


def parallelize_hand(model, mesh):
    return model


def step_hand(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= mesh.size()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    for p in model.parameters():
        p.grad *= (0.5 / (norm + 1e-6)).clamp(max=1.0)
    optimizer.step()
    return value.detach()


EXPECT = {"hand": {"verdict": "pass"}}
