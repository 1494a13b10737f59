"""Causes read off the values themselves: a rearrangement, or a lower precision."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.words import cause, listed, names_of
from spmd_verify.record import Cause, Row

# Slices compared pair by pair; more of them are not searched for an order.
MOST_SLICES: Final = 1024
# Elements to which flat buffers are padded: none, and powers of two as libraries use them.
ALIGNMENTS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
# Significant bits of the lower precisions, hidden bit included (IEEE 754 binary16; bfloat16).
LOWER: Final[dict[str, torch.dtype]] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: equal after a transposition, a shift or another order of slices."""
    found = exhibit.assembled(row)
    whole = exhibit.reference(row)
    if found is None or found.ndim == 0 or found.numel() < 2:
        return None
    tolerance = exhibit.tolerance(row)
    how = rearranged(found, whole, tolerance)
    if how is None and row.stage == "parameters":
        how = _rearranged_update(exhibit, row, found, whole, tolerance)
    if how is None:
        return None
    rows = [r for r in exhibit.mismatches(row.stage) if r.name == row.name or _also(exhibit, r)]
    text = f"{row.name} equals the reference {how}, over {', '.join(exhibit.wide_axes)}"
    return cause("layout", text, ranks=row.ranks, tensors=names_of(rows))


def _also(exhibit: Exhibit, row: Row) -> bool:
    """Say whether another tensor is rearranged too."""
    found = exhibit.assembled(row)
    if found is None or found.ndim == 0 or found.numel() < 2:
        return False
    return rearranged(found, exhibit.reference(row), exhibit.tolerance(row)) is not None


def _rearranged_update(
    exhibit: Exhibit, row: Row, found: Tensor, whole: Tensor, tolerance: float
) -> str | None:
    """Say how the update is rearranged, where the values before it were right."""
    before = before_step(exhibit, row)
    if before is None:
        return None
    how = rearranged(found - before, whole - before, 2.0 * tolerance)
    return None if how is None else f"after its update is {how.removeprefix('when ')}"


def before_step(exhibit: Exhibit, row: Row) -> Tensor | None:
    """Return the reference parameter before the row's step."""
    if row.step == 0:
        if exhibit.store.entry(0, "initial_state", row.name) is None:
            return None
        return exhibit.store.expected(0, "initial_state", row.name).to(torch.float64)
    return exhibit.reference(row, row.step - 1)


def rearranged(found: Tensor, whole: Tensor, tolerance: float) -> str | None:
    """Say by which rearrangement a tensor becomes the reference, None if by none."""
    if found.shape != whole.shape or float((found - whole).norm()) <= tolerance:
        return None
    is_square = found.ndim >= 2 and found.shape[-1] == found.shape[-2]
    if is_square and float((found.transpose(-1, -2) - whole).norm()) <= tolerance:
        return "transposed (rows and columns exchanged; transpose it back)"
    if found.ndim == 2:
        swapped = found.reshape(found.shape[::-1]).transpose(0, 1)
        if float((swapped - whole).norm()) <= tolerance:
            return "stored as its transpose (the buffer holds columns as rows; transpose it back)"
    for dim in range(found.ndim):
        order = slice_order(found, whole, dim, tolerance)
        if order is not None:
            return f"with the slices of dim {dim} in another order: {order_text(order)}"
    return _shuffled(found, whole, tolerance)


def _shuffled(found: Tensor, whole: Tensor, tolerance: float) -> str | None:
    """Say that a tensor holds the reference's very values, elsewhere."""
    left, right = found.reshape(-1).sort().values, whole.reshape(-1).sort().values
    off = float((left - right).norm())
    if left.numel() < 4 or off > tolerance or off > 1e-3 * float((found - whole).norm()):
        return None
    return "with its elements in another order (a transpose or reshape is missing or doubled)"


def flat_offset(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: a parameter got the values, or the update, of other places of a flat buffer."""
    rows = [r for r in exhibit.stage_rows("parameters") if exhibit.locals(r)]
    found, before = exhibit.assembled(row), before_step(exhibit, row)
    if found is None or before is None or sum(_size(r) for r in rows) > 1 << 22:
        return None
    tolerance = 4.0 * exhibit.tolerance(row)
    for what, own, all_of in (
        ("values", found, exhibit.reference),
        ("update", found - before, lambda r: _update(exhibit, r)),
    ):
        values = {r.name: value for r in rows if (value := all_of(r)) is not None}
        if len(values) < len(rows):
            continue
        for align in ALIGNMENTS:
            shift = _shift(own.reshape(-1), row.name, values, align, tolerance)
            if shift is not None:
                text = (
                    f"{row.name} got the {what} of other elements: offset by {shift} in the "
                    f"flattened parameters (buffer offsets, padding to {align} or the order of a "
                    f"gather are wrong)"
                )
                names = names_of(exhibit.mismatches("parameters"))
                return cause("layout", text, tensors=names, ranks=row.ranks)
    return None


def _size(row: Row) -> int:
    return math.prod(row.shape)


def _update(exhibit: Exhibit, row: Row) -> Tensor | None:
    """Return the reference's update of a parameter."""
    before = before_step(exhibit, row)
    return None if before is None else exhibit.reference(row) - before


def _shift(
    own: Tensor, name: str, values: dict[str, Tensor], align: int, tolerance: float
) -> int | None:
    """Return how far from its place in the packed values a vector is found, None if nowhere."""
    pieces, start, at = [], 0, 0
    for other, value in values.items():
        start = at if other == name else start
        padded = -(-value.numel() // align) * align
        pieces.append(torch.nn.functional.pad(value.reshape(-1), (0, padded - value.numel())))
        at += padded
    flat = torch.cat(pieces)
    if own.numel() < 4 or float(own.norm()) <= 8.0 * tolerance:
        return None
    probe = int(own.abs().argmax())
    for place in ((flat - own[probe]).abs() <= tolerance).nonzero().flatten().tolist():
        first = place - probe
        inside = first >= 0 and first + own.numel() <= at and first != start
        if inside and float((flat[first : first + own.numel()] - own).norm()) <= tolerance:
            return first - start
    return None


def slice_order(found: Tensor, whole: Tensor, dim: int, tolerance: float) -> list[int] | None:
    """Return, per slice of `found`, the slice of `whole` it is; None if they are no permutation."""
    left, right = (value.movedim(dim, 0).flatten(1) if value.ndim > 1 else value[:, None]
                   for value in (found, whole))  # fmt: skip
    size = left.shape[0]
    if not 1 < size <= MOST_SLICES:
        return None
    # Slices that are already right stay; equal slices (zeros) must not be shuffled.
    near = torch.cdist(left, right)
    limit = tolerance
    order = [-1] * size
    taken = [False] * size
    for i in range(size):
        if float(near[i, i]) <= limit:
            order[i], taken[i] = i, True
    for i in range(size):
        if order[i] >= 0:
            continue
        for j in near[i].argsort().tolist():
            if not taken[j]:
                if float(near[i, j]) > limit:
                    return None
                order[i], taken[j] = j, True
                break
    moved = [i for i, j in enumerate(order) if i != j]
    if not moved:
        return None
    left_over = float((left - right[torch.tensor(order)]).norm())
    # Values below the noise fit any order and say nothing.
    gained = float((left - right).norm())
    return order if left_over <= tolerance and gained > 4.0 * max(left_over, tolerance) else None


def order_text(order: list[int]) -> str:
    """Return an order as blocks of neighbours: `4-7, 0-3`."""
    size = len(order)
    shift = (order[0] - 0) % size
    if shift and all(j == (i + shift) % size for i, j in enumerate(order)):
        return f"shifted by {shift}, blocks {_blocks(order)}"
    return f"blocks {_blocks(order)}"


def _blocks(order: list[int]) -> str:
    spans: list[list[int]] = []
    for index in order:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:12]]
    return ", ".join(shown) + (" ..." if len(spans) > 12 else "")


def precision(exhibit: Exhibit, row: Row) -> Cause | None:
    """`precision`: the values went through a lower precision, or float64 makes it vanish."""
    held = exhibit.locals(row)
    whole = exhibit.reference(row)
    names = names_of(exhibit.mismatches(row.stage))
    for dtype, kind in LOWER.items():
        if not held or not _is_lower(kind, row.dtype):
            continue
        if _went_through(list(held.values()), kind, whole):
            text = (
                f"{listed(names)}: every value is one of {dtype}: it was rounded to {dtype} on "
                f"the way"
            )
            return cause("precision", text, ranks=row.ranks, tensors=names)
    relative = _relative(exhibit, row)
    if relative is not None and row.stage in ("module_outputs", "loss", "gradients"):
        for dtype, kind in LOWER.items():
            eps = torch.finfo(kind).eps
            is_near = row.dtype not in LOWER and 0.02 * eps <= relative <= eps
            if is_near and _is_noise(exhibit, row):
                text = (
                    f"{listed(names)}: relative error {relative:.1e}, that of values rounded "
                    f"to {dtype} ({eps:.1e})"
                )
                return cause("precision", text, ranks=row.ranks, tensors=names)
    if exhibit.experiments.get("float64"):
        text = f"{listed(names)}: the difference vanishes in float64: a matter of precision"
        return cause("precision", text, ranks=row.ranks, tensors=names)
    return None


def _is_lower(kind: torch.dtype, dtype: str) -> bool:
    """Say whether rounding to `kind` takes bits of a dtype."""
    return torch.finfo(kind).eps > torch.finfo(getattr(torch, dtype)).eps


def _went_through(values: list[Tensor], kind: torch.dtype, whole: Tensor) -> bool:
    """Say whether every value is one of a lower precision, and the reference's are not."""
    # One number is one of bfloat16 by chance once in 65,536 times.
    total = sum(value.numel() for value in values)
    if kind != torch.bfloat16 and total < 8:
        return False
    rounded = whole.to(kind).to(torch.float64)
    if float((rounded - whole).abs().max()) == 0.0:
        return False
    return all(bool((value.to(kind).to(torch.float64) == value).all()) for value in values)


def _relative(exhibit: Exhibit, row: Row) -> float | None:
    """Return the relative error of a tensor."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    norm = float(whole.norm())
    return None if found is None or norm == 0.0 else float((found - whole).norm()) / norm


def _is_noise(exhibit: Exhibit, row: Row) -> bool:
    """Say whether the error looks like rounding: no common factor, no element far above."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.numel() < 16:
        return False
    error = found - whole
    along = float((error * whole).sum()) / float(whole.norm() * error.norm())
    peak = float(error.abs().max()) / float(error.square().mean().sqrt())
    return abs(along) < 0.6 and peak < 12.0
