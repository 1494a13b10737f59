"""Which outputs are summands of the reference: ranks that each hold a part of a sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from spmd_verify.causes.exhibit import Exhibit, subsets
from spmd_verify.compare import layouts
from spmd_verify.layouts import Coordinate, Region, is_sharded, region, take_region
from spmd_verify.record import Row


def partial_over(exhibit: Exhibit, row: Row) -> tuple[tuple[str, ...], str] | None:
    """Return the axes over which ranks' outputs add up to the reference, if any do."""
    found = partial_parts(exhibit, row)
    return None if found is None else found[:2]


def partial_parts(
    exhibit: Exhibit, row: Row
) -> tuple[tuple[str, ...], str, dict[Coordinate, Region]] | None:
    """Return these axes, SUM or MEAN, and what part of the reference each rank has a summand of.

    Along other axes they may be parts of it.
    """
    held = exhibit.locals(row)
    if (row.run, row.step, row.stage, row.name) not in exhibit.by_key or len(held) < 2:
        return None
    for layout in layouts(row.shape, exhibit.shape):
        parts = {at: region(row.shape, layout, exhibit.shape, at) for at in held}
        if any(parts[at].shape != tuple(local.shape) for at, local in held.items()):
            continue
        cut = {a for a, each in zip(exhibit.axes, layout, strict=True) if is_sharded(each)}
        found = _summed_over(exhibit, row, parts, [a for a in exhibit.wide_axes if a not in cut])
        if found is not None:
            return (*found, parts) if found[0] else None
    return None


def _summed_over(
    exhibit: Exhibit, row: Row, parts: Mapping[Coordinate, Region], free: Sequence[str]
) -> tuple[tuple[str, ...], str] | None:
    """Return the axes of `free` over which sums are the ranks' parts; none where all are right."""
    held, tolerance = exhibit.locals(row), 4.0 * exhibit.tolerance(row)
    due = {at: take_region(exhibit.reference(row), part) for at, part in parts.items()}
    if all(float((held[at] - due[at]).norm()) <= tolerance for at in held):
        return (), ""
    for axes in subsets(free):
        sums = dict(held)
        for axis in axes:
            sums = {
                at: torch.stack([sums[each] for each in line]).sum(0)
                for line in exhibit.lines(axis, sums)
                for at in line
            }
        if not sums:
            continue
        count = math.prod(exhibit.axes[axis] for axis in axes)
        for how, divisor in (("SUM", 1.0), ("MEAN", float(count))):
            if all(float((s / divisor - due[at]).norm()) <= tolerance for at, s in sums.items()):
                return axes, how
    return None
