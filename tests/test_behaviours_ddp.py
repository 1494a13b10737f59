"""Behaviours 1-15, 19, 24-30, 53-55 of a data-parallel engine, on real ranks.

Under gradient_reduction="mean" the compiled step is eager DistributedDataParallel; under
the default it is one device on the global batch. The ranks' data always differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import Ranks
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import (
    FEW_STEPS,
    MANY_STEPS,
    Recorded,
    adam,
    assert_same,
    batches,
    built,
    count,
    ddp,
    engine,
    fused_adam,
    mean_loss,
    mlp,
    momentum,
    momentum_foreach,
    odd_mlp,
    part,
    sgd,
    single,
    state_of,
    sum_loss,
    train_step,
    whole,
)

import spmd
from spmd.layout import chunk_units

pytestmark = pytest.mark.dist

RUNS = {
    "1-sgd": (sgd, 1, FEW_STEPS),
    "2-momentum": (momentum, 5, MANY_STEPS),
    "3-foreach": (momentum_foreach, 5, MANY_STEPS),
    "4-fused-adam": (fused_adam, 5, MANY_STEPS),
}
STYLES = ("replicate", "fully_shard")


def train_as_ddp(make_optimizer: Any, steps: int, tolerance: Any, style: str, loss: Any) -> None:
    data = batches(steps)
    expected = ddp(mlp, make_optimizer, loss, data, warm=True)
    mode = spmd.DataParallel(style, gradient_reduction="mean")
    actual, _, model, _ = engine(mlp, make_optimizer, loss, data, mode, warm=True)
    assert_same(actual, expected, **tolerance)
    if style == "fully_shard":
        for name, parameter in model.named_parameters():
            full = actual["parameters"][name]
            torch.testing.assert_close(parameter.to_local(), part(full), rtol=0, atol=0)


def train_as_one_device(make_optimizer: Any, steps: int, tolerance: Any, style: str) -> None:
    data = batches(steps)
    expected = single(mlp, make_optimizer, sum_loss, data, warm=True)
    actual, *_ = engine(
        mlp, make_optimizer, sum_loss, data, spmd.DataParallel(style), warm=True
    )
    assert_same(actual, expected, **tolerance)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("run", RUNS)
def test_behaviours_1_to_8_mean_is_ddp(on_ranks: Ranks, run: str, style: str) -> None:
    on_ranks(train_as_ddp, *RUNS[run], style, sum_loss)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("run", RUNS)
def test_behaviours_1_to_8_global_is_one_device(on_ranks: Ranks, run: str, style: str) -> None:
    on_ranks(train_as_one_device, *RUNS[run], style)
