"""What a compiled step holds: freed with the step, shared by builds of one case."""

import gc
import weakref

import pytest
import torch
from torch import nn

from spmd import DataParallel, lockstep
from spmd_verify.cases.case import load_case


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


@pytest.mark.parametrize("example", ["mlp", "transformer", "recurrent"])
def test_a_capture_of_an_ordinary_case_serves_every_build(root, example):
    case = load_case(str(root / "examples" / f"{example}.py"))
    captures = lockstep.CaptureCache()
    compiled = []
    for style in ("replicate", "fully_shard"):
        model = case.build_model()
        compiled.append(
            lockstep.compile(parallel_mode=DataParallel(style), mesh={"dp": 2}, captures=captures)(
                case.step
            )
        )
        optimizer = case.optimizer(model)
        for index in range(3):
            case.seed_step(index)
            compiled[-1](model, optimizer, case.batch(index))

    assert [step.captures for step in compiled] == [3, 0]
