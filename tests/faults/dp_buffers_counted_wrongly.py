"""Two buffers that go wrong beside right gradients. `twice`: activation checkpointing runs the
block again in backward and its running level moves twice a step; `count`: the number of seen
samples counts the rank's own. The twins hold the update during recomputation and count all ranks.
Class: https://github.com/NVIDIA/Megatron-LM/issues/1446 (state beside the forward)
"""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("level", torch.full((width,), 0.5))
        self.group, self.held = None, False

    def forward(self, x):
        if self.training and not self.held:
            level = x.detach().square().mean(0)
            if self.group is not None:
                dist.all_reduce(level, group=self.group)
                level /= self.group.size()
            self.level.lerp_(level, 0.2)
        return F.softplus(self.inner(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, 5)
        self.block = Block(5)
        self.out = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.run_block, self.replicas = None, 1

    def forward(self, x):
        self.seen += self.training * self.replicas * x.shape[0]
        return self.out((self.run_block or self.block)(self.lift(x)))


def get_inputs(step=0):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(11800 + step))


def get_targets(step=0):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(11900 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def _wrap(model, mesh, hold, count_all):
    block = model.block

    @contextmanager
    def held():
        block.held = hold
        try:
            yield
        finally:  # recomputation stops early, by an exception
            block.held = False

    model.run_block = lambda x: checkpoint(
        block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), held())
    )
    block.group = mesh.get_group("dp")
    model.replicas = mesh.size() if count_all else 1
    return DistributedDataParallel(model, process_group=block.group, forward_sync_buffers=False)


def parallelize_bad_twice(model, mesh):
    return _wrap(model, mesh, hold=False, count_all=True)


def parallelize_bad_count(model, mesh):
    return _wrap(model, mesh, hold=True, count_all=False)


def parallelize_good_twice(model, mesh):
    return _wrap(model, mesh, hold=True, count_all=True)


parallelize_good_count = parallelize_good_twice


def _fault(name):
    return {
        "verdict": "mismatch",
        "kind": ["buffer"],
        "stage": "buffers",
        "tensors": [name],
        "mentions": [name],
    }


EXPECT = {
    "bad_twice": _fault("block.level"),
    "good_twice": {"verdict": "pass"},
    "bad_count": _fault("seen"),
    "good_count": {"verdict": "pass"},
}
