"""Causes in how ranks' gradients are put together: reductions missing, doubled, misplaced."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit, subsets
from spmd_verify.causes.words import cause, listed, names_of, number, ranks_text, rows_text
from spmd_verify.layouts import Region, take_region
from spmd_verify.record import Cause, Row


def missing_reduction(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction` or `no_sync`: SUM or MEAN over an axis gives the reference."""
    found = reduces_to(exhibit, row)
    if found is None:
        return None
    axes, how = found
    same = [r for r in exhibit.mismatches(row.stage) if reduces_to(exhibit, r) == found]
    names = names_of([row, *same])
    over = ", ".join(axes)
    is_data = all(exhibit.is_data_axis(axis) for axis in axes)
    if is_data and exhibit.fact("wrappers"):
        return cause("no_sync", _unsynced_text(exhibit, names, over), tensors=names, axis=axes[0],
                     ranks=row.ranks)  # fmt: skip
    text = (
        f"{how} over {over} equals the reference: the gradient of {listed(names)} is never "
        f"all-reduced over {over}; the replicas disagree"
    )
    return cause("missing_reduction", text, tensors=names, axis=axes[0], ranks=row.ranks)


def _unsynced_text(exhibit: Exhibit, names: list[str], over: str) -> str:
    """Say which parameters are not synchronised although a wrapper is there."""
    wrapper = exhibit.fact("wrappers")[0]
    entered = "" if exhibit.fact("is_entered") else f"; {wrapper}.forward never ran"
    return (
        f"the replicas of {listed(names)} disagree over {over}: each rank has the gradient of "
        f"its own data, never synchronised by {wrapper}{entered}"
    )


def reduces_to(exhibit: Exhibit, row: Row) -> tuple[tuple[str, ...], str] | None:
    """Return the axes and SUM or MEAN over which the ranks' tensors give the reference."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    tolerance = 4.0 * exhibit.tolerance(row)
    if len(held) < 2:
        return None
    for axes in subsets(exhibit.wide_axes):
        sums, owners = dict(held), {}
        for part, coordinates in exhibit.regions(row).items():
            owners.update(dict.fromkeys(coordinates, part))
        for axis in axes:
            sums = _summed(exhibit, axis, sums, owners)
        if len(sums) < len(held):
            continue
        count = math.prod(exhibit.axes[axis] for axis in axes)
        for how, divisor in (("SUM", 1.0), ("MEAN", float(count))):
            if _all_right(sums, owners, whole, divisor, tolerance):
                return axes, how
    return None


def _summed(
    exhibit: Exhibit,
    axis: str,
    sums: dict,
    owners: dict,
) -> dict:
    """Return sums along an axis over ranks that hold the same part."""
    found = {}
    for line in exhibit.lines(axis, sums):
        if len({owners.get(at) for at in line}) == 1 and owners.get(line[0]) is not None:
            total = torch.stack([sums[at] for at in line]).sum(0)
            found.update(dict.fromkeys(line, total))
    return found


def _all_right(
    sums: dict,
    owners: dict,
    whole: Tensor,
    divisor: float,
    tolerance: float,
) -> bool:
    """Say whether every rank's sum is its part of the reference."""
    return all(
        float((total / divisor - take_region(whole, owners[at])).norm()) <= tolerance
        for at, total in sums.items()
    )


def doubled_rows(exhibit: Exhibit, row: Row) -> Cause | None:
    """`double_reduction`: some rows, or some shards, are a whole multiple, the rest is right."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.ndim == 0:
        return None
    tolerance = 2.0 * exhibit.tolerance(row)
    by_shard = _shard_factors(exhibit, row, tolerance)
    if by_shard is not None:
        return by_shard
    for name, left, right in (
        ("rows", found.flatten(1) if found.ndim > 1 else found[:, None],
         whole.flatten(1) if whole.ndim > 1 else whole[:, None]),
        ("elements", found.reshape(-1, 1), whole.reshape(-1, 1)),
    ):  # fmt: skip
        split = _two_factors(left, right, tolerance)
        if split is None:
            continue
        k, rows = split
        kind = "double_reduction" if k > 1.0 else "missing_reduction"
        what = "reduced twice" if k > 1.0 else "scaled once too often"
        text = (
            f"{row.name}: {name} {rows_text(rows)} are {number(k)} x the reference, the others "
            f"are right: these are {what} over {', '.join(exhibit.wide_axes)}"
        )
        return cause(kind, text, tensors=[row.name], factor=k, ranks=row.ranks)
    return None


def _two_factors(left: Tensor, right: Tensor, tolerance: float) -> tuple[float, list[int]] | None:
    """Return `(k, rows)` where rows are k times the reference and all others equal it."""
    power = right.square().sum(1)
    error = (left - right).norm(dim=1)
    wrong = error > tolerance
    if not bool(wrong.any()) or bool((wrong | (power == 0)).all()):
        return None
    chosen = wrong.nonzero().flatten()
    rows_l, rows_r = left[chosen], right[chosen]
    total = float(rows_r.square().sum())
    if total == 0.0:
        return None
    k = float((rows_l * rows_r).sum()) / total
    if float((rows_l - k * rows_r).norm()) > tolerance * max(1.0, abs(k)):
        return None
    if abs(k - 1.0) < 1e-3 or abs(k) < 1e-6:
        return None
    return k, chosen.tolist()


def _shard_factors(exhibit: Exhibit, row: Row, tolerance: float) -> Cause | None:
    """Say that the shard of some ranks is a multiple of its part of the reference."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    factors: dict[Region, float] = {}
    regions = exhibit.regions(row)
    if len(regions) < 2:
        return None
    for part, coordinates in regions.items():
        local, right = held[coordinates[0]], take_region(whole, part)
        power = float(right.square().sum())
        if not power:
            continue
        k = float((local * right).sum()) / power
        if float((local - k * right).norm()) > tolerance * max(1.0, abs(k)):
            return None
        factors[part] = k
    off = {part: k for part, k in factors.items() if abs(k - 1.0) > 1e-4}
    if not off or (len(off) == len(factors) > 1 and len({round(k, 6) for k in off.values()}) == 1):
        return None
    ranks = [exhibit.rank_of(at) for part in off for at in regions[part]]
    shown = ", ".join(number(k) for k in dict.fromkeys(round(k, 9) for k in off.values()))
    is_double = all(abs(k - round(k)) < 1e-4 and k > 1.5 for k in off.values())
    kind = "double_reduction" if is_double and len(off) < len(factors) else "factor"
    text = f"{row.name}: the part of {ranks_text(ranks)} is {shown} x the reference"
    return cause(kind, text, tensors=[row.name], ranks=sorted(set(ranks)))
