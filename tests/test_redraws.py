"""Rows that fail alone and by little are judged by more noise runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_verify.examination.redraws import DRAWS, redraw
from spmd_verify.record import Row

REFERENCE = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)


def _row(name: str = "weight", *, ratio: float = 5.0, row: int | None = 1, step: int = 0) -> Row:
    """Return a failing row whose noise is 1e-9 in dim-0 row 1."""
    return Row(
        name=name, stage="gradients", step=step, verdict="mismatch", shape=[2, 2],
        dtype="float32", error=ratio * 1e-9, noise=1e-9, ratio=ratio,
        unknown={} if row is None else {"row": row},
    )  # fmt: skip


class _Exhibit:
    """A step on one device whose draws move row 1 by given amounts."""

    def __init__(self, moves: list[float]) -> None:
        self.step, self.batch = 0, None
        self.made: list[int] = []
        self.moves = moves
        self.runs = SimpleNamespace(record=self._record)

    def _record(self, _batch: Any, *, in_float64: bool, rounding: int) -> Any:
        assert not in_float64
        value = REFERENCE.clone()
        value[1, 0] += self.moves[len(self.made) % len(self.moves)]
        self.made.append(rounding)
        return {"gradients": {"weight": value, "other": value}}

    def reference(self, _row: Row) -> torch.Tensor:
        return REFERENCE


def test_a_row_within_more_draws_is_rounding() -> None:
    row, exhibit = _row(), _Exhibit([1e-10, 1.3e-9])

    redraw(exhibit, [row])  # type: ignore[arg-type]

    assert row.verdict == "rounding"
    assert row.noise == pytest.approx(1.3e-9)
    assert row.ratio == pytest.approx(5.0 / 1.3)
    assert len(set(exhibit.made)) == DRAWS


def test_a_fault_stays_above_any_number_of_draws() -> None:
    row = _row(ratio=30.0)

    redraw(_Exhibit([1.3e-9]), [row])  # type: ignore[arg-type]

    assert row.verdict == "mismatch"
    assert row.ratio == 30.0


@pytest.mark.parametrize(
    "rows",
    [
        [_row(row=None)],  # the whole tensor failed
        [_row(ratio=1e5)],  # by far
        [_row(), _row("other", row=None)],  # not alone
        [_row(f"weight{i}") for i in range(9)],  # too many
        [_row(step=1)],  # not the step that is examined
    ],
)
def test_what_chance_does_not_make_is_not_drawn_again(rows: list[Row]) -> None:
    exhibit = _Exhibit([1.0])

    redraw(exhibit, rows)  # type: ignore[arg-type]

    assert exhibit.made == []
    assert {row.verdict for row in rows} == {"mismatch"}
