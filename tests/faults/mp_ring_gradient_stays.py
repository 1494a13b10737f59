"""Ring attention, hand to hand: key and value blocks travel around the ring. Their gradients have
to travel back; in `bad` backward keeps what it is given, so that every rank credits its own tokens
with the gradients of its neighbours' blocks. Outputs and loss are right.
Class: https://github.com/NVIDIA/Megatron-LM/issues/1464 (context-parallel attention that differs
from one device)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 4)
        self.pair = nn.Linear(6, 8, bias=False)
        self.out = nn.Linear(4, 2)
        self.attend = F.scaled_dot_product_attention

    def forward(self, x):
        key, value = self.pair(x).chunk(2, dim=-1)
        return self.out(self.attend(self.query(x), key, value))


def get_inputs(step=0):
    return _noise(7100 + step, 3, 9, 6)


def get_targets(step=0):
    return _noise(7130 + step, 3, 9, 2)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.4, momentum=0.9)


def _pass_on(block, group, hops):
    ranks, rank = group.size(), group.rank()
    received = torch.empty_like(block)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block.contiguous(), (rank + hops) % ranks, group),
            dist.P2POp(dist.irecv, received, (rank - hops) % ranks, group),
        ]
    )
    for work in works:
        work.wait()
    return received


class _Hop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, group, is_sent_back):
        ctx.group, ctx.is_sent_back = group, is_sent_back
        return _pass_on(block, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return (_pass_on(grad, ctx.group, -1) if ctx.is_sent_back else grad), None, None


def _ring(group, is_sent_back):
    def attend(query, key, value):
        block = torch.cat([key, value], -1)
        outs, weights = [], []
        for hop in range(group.size()):
            key, value = block.chunk(2, dim=-1)
            scores = query @ key.mT / query.shape[-1] ** 0.5
            outs.append(scores.softmax(-1) @ value)
            weights.append(scores.logsumexp(-1, keepdim=True))
            if hop + 1 < group.size():
                block = _Hop.apply(block, group, is_sent_back)
        return (torch.stack(outs) * torch.stack(weights).softmax(0)).sum(0)

    return attend


def mesh_good():
    return {"cp": 3}


def input_sharding_good():
    return {"x": {"cp": 1}, "targets": {"cp": 1}}


def parallelize_good(model, mesh):
    model.attend = _ring(mesh.get_group("cp"), True)


def step_good(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    value = value.detach().clone()
    for tensor in [value, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor, group=mesh.get_group("cp"))
        tensor.div_(mesh.size())
    optimizer.step()
    return value


def parallelize_bad(model, mesh):
    model.attend = _ring(mesh.get_group("cp"), False)


mesh_bad, input_sharding_bad, step_bad = mesh_good, input_sharding_good, step_good

EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["unexplained"],
        "stage": "gradients",
        "tensors": ["pair.weight"],
        "mentions": ["pair.weight"],
    },
    "good": {"verdict": "pass"},
}
