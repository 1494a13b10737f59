"""Partial data under a Replicate label; nothing checks labels. `bad_value`: the local partial
product of a cut matmul is wrapped as Replicate. `bad_grad`: a head evaluated in chunks collects the
hidden state's gradient, this rank's part of it, and hands it back as Replicate. The twins say
Partial and redistribute.
Class: https://github.com/pytorch/torchtitan/pull/3412
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def _noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.act = nn.Softsign()
        self.head = nn.Linear(8, 8, bias=False)
        self.post = nn.Tanh()

    def forward(self, x):
        return self.post(self.head(self.act(self.enter(x))))


def get_inputs(step=0):
    return _noise(1000 + step, 6, 5)


def get_targets(step=0):
    return _noise(1030 + step, 6, 8)


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.6, foreach=False)


def mesh_bad_value():
    return {"tp": 2}


def mesh_bad_grad():
    return {"tp": 3}


mesh_good_value, mesh_good_grad = mesh_bad_value, mesh_bad_grad


def _value(model, mesh, label):
    head = model.head
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(1)]))

    def forward(h):
        own = DTensor.from_local(h, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        product = own.to_local() @ head.weight.to_local().t()
        out = DTensor.from_local(product, mesh, [label], run_check=False)
        return out.redistribute(placements=[Replicate()]).to_local()

    head.forward = forward
    return model


def parallelize_bad_value(model, mesh):
    return _value(model, mesh, Replicate())


def parallelize_good_value(model, mesh):
    return _value(model, mesh, Partial())


class _ChunkedColumns(torch.autograd.Function):
    """The head's local columns, all gathered; backward goes through two chunks of samples."""

    @staticmethod
    def forward(ctx, hidden, weight, mesh, label):
        ctx.save_for_backward(hidden, weight.to_local())
        ctx.mesh, ctx.label, ctx.shape = mesh, label, weight.shape
        local = (hidden @ weight.to_local().t()).contiguous()
        shape, stride = (hidden.shape[0], weight.shape[0]), (weight.shape[0], 1)
        out = DTensor.from_local(local, mesh, [Shard(1)], shape=shape, stride=stride)
        return out.full_tensor()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        own = distribute_tensor(grad, ctx.mesh, [Shard(1)], src_data_rank=None).to_local()
        parts = [chunk @ weight for chunk in own.chunk(2)]
        whole = DTensor.from_local(torch.cat(parts), ctx.mesh, [ctx.label], run_check=False)
        weight_grad = DTensor.from_local(
            own.t() @ hidden, ctx.mesh, [Shard(0)], shape=ctx.shape, stride=(ctx.shape[1], 1)
        )
        return whole.full_tensor(), weight_grad, None, None


def _chunked(model, mesh, label):
    head = model.head
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    head.forward = lambda h: _ChunkedColumns.apply(h, head.weight, mesh, label)
    return model


def parallelize_bad_grad(model, mesh):
    return _chunked(model, mesh, Replicate())


def parallelize_good_grad(model, mesh):
    return _chunked(model, mesh, Partial())


def _fault(stage, tensors, mention):
    return {
        "verdict": "mismatch",
        "kind": ["missing_reduction"],
        "stage": stage,
        "tensors": tensors,
        "mentions": [mention, "tp"],
    }


EXPECT = {
    "bad_value": _fault("module_outputs", ["post"], "head"),
    "good_value": {"verdict": "pass"},
    "bad_grad": _fault("gradients", ["enter.weight", "enter.bias"], "enter.weight"),
    "good_grad": {"verdict": "pass"},
}
