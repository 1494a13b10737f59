"""What a compiled step held is free once nobody has the step any more."""

import gc
import weakref

import pytest
import torch
from torch import nn

from spmd import DataParallel, lockstep


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_nothing_keeps_a_step_that_nobody_has(style):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    compiled = lockstep.compile(parallel_mode=DataParallel(style), mesh={"dp": 2})(step)
    for _ in range(2):
        compiled(model, optimizer, torch.randn(4, 3))
    held = weakref.ref(compiled)

    del compiled
    gc.collect()

    assert held() is None
