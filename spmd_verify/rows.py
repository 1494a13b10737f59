"""Rows of the record: making one, and what is read off all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_verify.merge import Merged
from spmd_verify.record import Row, WorstElement, WorstTensor
from spmd_verify.stored.store import Entry, FloorInfo
from spmd_verify.verdict import Verdict


@dataclass
class Fit:
    """A tensor's error beside its noise, by the tensor norm and by its worst row."""

    error: float
    noise: float
    row: int = 0
    row_error: float = 0.0
    row_noise: float = 0.0
    row_ratio: float = 0.0
    reason: str | None = None

    def show(self, row: Row) -> None:
        """Put the norm that decided into a row, in place."""
        row.error, row.ratio = self.error, ratio_of(self.error, self.noise)
        if self.row_ratio > row.ratio:
            row.error, row.noise, row.ratio = self.row_error, self.row_noise, self.row_ratio
            row.unknown["row"] = self.row


def ratio_of(error: float, noise: float) -> float:
    """Return error / noise; 0 for no error, inf for an error where there is no noise."""
    return 0.0 if error == 0.0 else error / noise if noise > 0.0 else math.inf


def blank_row(entry: Entry, run: str, merged: Merged, floor: FloorInfo) -> Row:
    """Return a row with everything but its verdict."""
    error = math.inf if merged.non_finite else float(merged.squares.sum().sqrt())
    worst = merged.worst
    return Row(
        name=entry.name,
        aliases=list(entry.aliases),
        stage=entry.stage,
        step=entry.step,
        run=run,
        shape=list(entry.shape),
        dtype=entry.dtype,
        layout=merged.layout,
        verdict="",
        error=error,
        noise=floor.noise,
        ratio=ratio_of(error, floor.noise),
        max_ulp=merged.max_ulp,
        worst=None
        if worst is None
        else WorstElement(
            index=list(worst.worst_index or []), actual=worst.actual, expected=worst.expected
        ),
        unknown={"scale": floor.scale, "differing": merged.differing},
    )


def worst_row(rows: Sequence[Row]) -> WorstTensor | None:
    """Return the row with the largest error / noise among those that were measured."""
    judged = [
        row
        for row in rows
        if row.verdict in (Verdict.ROUNDING, Verdict.MISMATCH) and row.ratio is not None
    ]
    if not judged:
        return None
    row = max(judged, key=lambda row: (row.verdict == Verdict.MISMATCH, row.ratio))
    return WorstTensor(
        tensor=row.name,
        stage=row.stage,
        step=row.step,
        error=row.error or 0.0,
        noise=row.noise or 0.0,
        ratio=row.ratio or 0.0,
    )


def growth(rows: Sequence[Row], steps: int) -> list[float]:
    """Return, per step, the largest error / noise of parameters that were measured."""
    return [
        max(
            (row.ratio or 0.0)
            for row in [*_of(rows, step), Row(name="", stage="", step=step, verdict="")]
        )
        for step in range(steps)
    ]


def _of(rows: Sequence[Row], step: int) -> list[Row]:
    """Return the parameter rows of a step whose ratio says something."""
    return [
        row
        for row in rows
        if row.step == step
        and row.stage == "parameters"
        and row.verdict in (Verdict.ROUNDING, Verdict.MISMATCH)
    ]
