"""What rows mean for each other: mismatches nothing follows from, and what follows from one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from spmd_verify.record import Row
from spmd_verify.verdict import LIMITS, Verdict, cell_verdict

# A wrong update is visible from this many times the noise of the parameter: twice the largest
# limit c, and four for updates that are less than proportional to the gradient.
VISIBLE: Final = 8.0 * max(LIMITS.values())
# Stages that localise a fault and never make one alone.
_LOCALISING: Final = ("inputs", "module_outputs")


def settle(rows: list[Row]) -> None:
    """Let inputs and module outputs be a mismatch only where a later stage of the step is one.

    In place. Alone they say nothing: a style may feed and compute otherwise and be right.
    """
    _settle_gradients(rows)
    confirmed = {
        row.step for row in rows if row.verdict == Verdict.MISMATCH and row.stage not in _LOCALISING
    }
    for row in rows:
        if row.stage not in _LOCALISING or row.step in confirmed:
            continue
        if row.verdict == Verdict.MISMATCH:
            row.verdict, row.cause = Verdict.UNDETERMINED, None
            row.unknown["reason"] = "it differs, but nothing computed from it does"


def _settle_gradients(rows: list[Row]) -> None:
    """Let a gradient be no mismatch where it is not what the optimizer used, in place.

    A style may leave gradients of parts it does not own unreduced, or reduce them elsewhere.
    Had the optimizer used such a gradient, the parameter would differ visibly (`would_show`);
    where state and parameter are right all the same, it used another one. A fault too small to
    show in the parameter stays what it is.
    """
    wrong = {
        (row.step, _owner(row)) for row in rows if row.verdict == Verdict.MISMATCH
        and row.stage in ("optimizer_state", "parameters")
    }  # fmt: skip
    right = {
        (row.step, row.name): row
        for row in rows
        if row.stage == "parameters" and row.verdict in (Verdict.EXACT, Verdict.ROUNDING)
    }
    norms = any(
        row.stage == "clipping"
        and row.name in ("total_norm", "clip_factor")
        and row.verdict == Verdict.MISMATCH
        for row in rows
    )
    steps = {step for step, _ in right}
    for row in rows:
        is_gradient = row.stage in ("gradients", "clipping")
        if not is_gradient or row.verdict != Verdict.MISMATCH or norms:
            continue
        later = [step for step in steps if step >= row.step]
        is_right = all((step, row.name) in right.keys() - wrong for step in later)
        if is_right and later and would_show(row, right.get((row.step, row.name))):
            row.verdict, row.cause = Verdict.UNDETERMINED, None
            row.unknown["reason"] = (
                "it differs as read before the step, but state and parameter computed from it are "
                "right: it is not what the optimizer used, or the optimizer hides it; a probe with "
                "SGD decides"
            )


def would_show(row: Row, parameter: Row | None) -> bool:
    """Say whether the parameter would differ visibly, had the optimizer used this gradient.

    By proportion: an update as wrong as the gradient is, against the noise of the parameter.
    """
    if parameter is None or not parameter.noise:  # no floor: rounding may hide a small one
        return False
    expected = float(row.unknown.get("share", 0.0)) * float(row.unknown.get("update", 0.0))
    return expected > VISIBLE * parameter.noise


def _owner(row: Row) -> str:
    """Return the parameter that a row of state or parameters is about."""
    return row.name.rpartition(".")[0] if row.stage == "optimizer_state" else row.name


def mark_downstream(rows: list[Row], first: Row | None) -> None:
    """Name the first divergence in every later mismatch, in place.

    What is only `semantic` before the first mismatch follows from the first of its own.
    """
    source: Row | None = None
    for row in rows:
        row.downstream_of = None
        if first is None or row.verdict not in (Verdict.MISMATCH, Verdict.SEMANTIC):
            continue
        if row is first or source is None:
            source = row
        else:
            row.downstream_of = f"step {source.step}, {source.stage}, {source.name}"


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Count rows by verdict, in the order of the verdicts; those without rows are absent."""
    found = Counter(str(row.verdict) for row in rows)
    return {str(word): found[word] for word in Verdict if found[word]}


def verdict_of(rows: Sequence[Row], last_step: int, *, is_exercised: bool) -> tuple[Verdict, int]:
    """Return the verdict of a cell, and how many parameter elements nothing decides.

    Args:
        rows: All of the cell.
        last_step: Whose parameters are counted.
        is_exercised: Whether any gradient or parameter carried signal.
    """
    moved = [
        row
        for row in rows
        if row.stage == "parameters"
        and row.step == last_step
        and row.verdict != Verdict.NOT_EXERCISED
    ]
    undetermined = sum(map(_undetermined_elements, moved))
    verdict = cell_verdict(
        (row.verdict for row in rows),
        is_exercised=is_exercised,
        undetermined_elements=undetermined,
        signal_elements=sum(math.prod(row.shape) for row in moved),
    )
    return verdict, undetermined


def _undetermined_elements(row: Row) -> int:
    """Count the elements of a parameter row that nothing decides."""
    if row.verdict == Verdict.UNDETERMINED:
        return math.prod(row.shape)
    return int(row.unknown.get("undetermined_elements", 0))
