"""False-alarm trap: the step shows no reduction. `before_step` reduces in a hook that runs inside
optimizer.step, `as_ready` in hooks of the parameters, asynchronously, and waits there.
Compare https://github.com/NVIDIA/Megatron-LM/issues/1446 (gradients read too early)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, series):
        h = series.new_zeros(series.shape[0], 5)
        for x in series.unbind(1):
            h = self.cell(x, h)
        return self.out(h)


def get_inputs(step=0):
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(16000 + step))


def get_targets(step=0):
    return torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(16100 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.6)


def setup_before_step(model, mesh):
    optimizer = get_optimizer(model.parameters())

    def average(optimizer, args, kwargs):
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
            p.grad /= mesh.size()

    optimizer.register_step_pre_hook(average)
    return model, optimizer


def setup_as_ready(model, mesh):
    optimizer = get_optimizer(model.parameters())
    pending = []

    def start(p):
        p.grad /= mesh.size()
        pending.append(dist.all_reduce(p.grad, group=mesh.get_group("dp"), async_op=True))

    def finish(optimizer, args, kwargs):
        while pending:
            pending.pop().wait()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    optimizer.register_step_pre_hook(finish)
    return model, optimizer


def step_before_step(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach()


step_as_ready = step_before_step

EXPECT = {"before_step": {"verdict": "pass"}, "as_ready": {"verdict": "pass"}}
