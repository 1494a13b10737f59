"""Drawn models that once found a fault of the engine, each named by what was wrong."""

from __future__ import annotations

import pytest

from spmd_verify.drawn.check import Tally, check_drawn
from spmd_verify.drawn.layers import Norm
from spmd_verify.drawn.model import DrawnModel
from spmd_verify.drawn.parts import Dropout, Residual
from spmd_verify.drawn.style import Placing
from spmd_verify.drawn.training import Inputs, Loss, Training

FEATURES = Inputs(batch=3, tokens=2, width=2)

FOUND = {
    "running statistics of a batch norm called twice in a step": (
        DrawnModel(FEATURES, (Norm("batch"),), Loss(), Training(accumulate=2)),
        Placing((2,)),
    ),
    "a draw into a replica that was gathered on two axes": (
        DrawnModel(
            Inputs(batch=3, tokens=2, width=2, kind="ids"),
            (Dropout("bernoulli"),),
            Loss("entropy", tied=True),
            Training(warm=1),
        ),
        Placing((4, 2)),
    ),
    "slices of statistics read as if they had no gaps": (
        DrawnModel(
            Inputs(batch=2, tokens=2, width=2, time_first=True),
            (Residual((Norm("group"), Norm("layer"))),),
            Loss(),
            Training(warm=1),
        ),
        Placing((2,)),
    ),
    "a gathered dim without elements": (
        DrawnModel(Inputs(batch=1, tokens=1, width=1), (), Loss("nll-shifted"), Training(warm=1)),
        Placing((2,), inputs=(1,), named=False),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_drawn_model_found_stays_right(name: str) -> None:
    check_drawn(*FOUND[name])


def test_gradients_that_are_kept_and_zeroed_need_no_gathering() -> None:
    tally = Tally()

    check_drawn(DrawnModel(FEATURES, (), Loss(), Training(zero="zeros", warm=1)), Placing(), tally)

    assert not tally.fallbacks
