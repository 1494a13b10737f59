"""Parameters that no gradient moves: averages of others, and copies of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import left_by
from spmd_verify.causes.patterns import before_step
from spmd_verify.causes.words import cause, listed, names_of, number
from spmd_verify.record import Cause, Row


class Followed(NamedTuple):
    """What an average follows.

    Attributes:
        row: The parameter.
        share: How much of the way to it one step goes; 1 for a copy.
    """

    row: Row
    share: float


def followed(exhibit: Exhibit, row: Row) -> Followed | None:
    """Return the parameter that this one moves towards on one device, None where it has its own.

    `after = before + share * (other - before)`, with the other's value after the step.
    """
    before = before_step(exhibit, row)
    if before is None or row.name in exhibit.store.names(row.step, "gradients"):
        return None
    moved = exhibit.reference(row) - before
    if not bool(moved.any()) or moved.numel() < 2:
        return None
    for other in exhibit.stage_rows("parameters"):
        if other.name == row.name or other.shape != row.shape:
            continue
        share = _share(exhibit, row, moved, exhibit.reference(other) - before)
        if share is not None:
            return Followed(other, share)
    return None


def _share(exhibit: Exhibit, row: Row, moved: Tensor, way: Tensor) -> float | None:
    """Return which multiple of a way was gone, None where it is none between 0 and 1."""
    power = float(way.square().sum())
    k = float((moved * way).sum()) / power if power else 0.0
    is_share = 1e-6 < k <= 1.0 + 1e-6
    return k if is_share and left_by(moved, way, k) <= 4.0 * exhibit.tolerance(row) else None


def said(row: Row, source: Followed) -> str:
    """Say what a parameter follows."""
    if source.share > 1.0 - 1e-6:
        return f"no gradient moves {row.name}, on one device it is a copy of {source.row.name}"
    return (
        f"no gradient moves {row.name}, on one device it is an average that goes "
        f"{number(source.share)} of the way to {source.row.name} in every step"
    )


def of_old_values(exhibit: Exhibit, row: Row) -> Cause | None:
    """`stale`: an average follows what a parameter was before the step."""
    source, before = followed(exhibit, row), before_step(exhibit, row)
    found = exhibit.assembled(row)
    if source is None or before is None or found is None:
        return None
    start = before_step(exhibit, source.row)
    if start is None:
        return None
    due = before + source.share * (start - before)
    if float((found - due).norm()) > 4.0 * exhibit.tolerance(row):
        return None
    names = names_of(exhibit.mismatches("parameters"))
    text = (
        f"{listed(names)}: {said(row, source)}; here it follows the value of {source.row.name} "
        f"from before the step: it is averaged before the update, or with a copy that is not "
        f"renewed"
    )
    return cause("stale", text, tensors=names, ranks=row.ranks)
