"""A value of forward that is a rank's summand where the sum is due: `missing_reduction`."""

from __future__ import annotations

import math

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected, partial_over
from spmd_verify.causes.words import cause, number
from spmd_verify.record import Cause, Row


def unreduced_output(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: a value used here is only this rank's summand."""
    before = _partial_before(exhibit, row)
    if before is None:
        return None
    name, axes, how = before
    alike = _alike_summand(exhibit, row, name, axes)
    if alike is not None:
        return alike
    text = (
        f"{name}: {how} over {', '.join(axes)} equals the reference, yet {row.name} is computed "
        f"from one rank's value: the all-reduce over {', '.join(axes)} is missing"
    )
    return cause(
        "missing_reduction", text, tensors=[name, row.name, *affected(exhibit)], ranks=row.ranks,
        axis=axes[0],
    )  # fmt: skip


def _alike_summand(exhibit: Exhibit, row: Row, name: str, axes: tuple[str, ...]) -> Cause | None:
    """`factor`: the summands of all ranks are one value: a factor, whatever was meant."""
    before = exhibit.by_key[exhibit.run, exhibit.step, "module_outputs", name]
    held, whole = exhibit.locals(before), exhibit.reference(before)
    count = math.prod(exhibit.axes[axis] for axis in axes)
    off = [float((local - whole / count).norm()) for local in held.values()
           if local.shape == whole.shape]  # fmt: skip
    if len(off) < len(held) or max(off) > 4.0 * exhibit.tolerance(before):
        return None
    over = " and ".join(axes)
    text = (
        f"{name} is {number(1.0 / count)} x the reference on every rank alike, and {row.name} is "
        f"computed from it: 1 / the {count} ranks of {over}"
    )
    return cause(
        "factor", text, factor=1.0 / count, axis=axes[0], ranks=row.ranks,
        tensors=[name, row.name, *affected(exhibit)],
    )  # fmt: skip


def _partial_before(exhibit: Exhibit, row: Row) -> tuple[str, tuple[str, ...], str] | None:
    """Return the last module output up to this one that is a summand: name, axes, SUM or MEAN."""
    rows = exhibit.stage_rows("module_outputs")
    names = [r.name for r in rows]
    end = names.index(row.name) if row.stage == "module_outputs" and row.name in names else None
    upto = rows if end is None else rows[: end + 1]
    for each in reversed(upto):
        found = partial_over(exhibit, each)
        if found is not None:
            return (each.name, *found)
    return None
