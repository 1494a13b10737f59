"""Measure parts of a candidate against the same parts of the reference.

`statistics_of` says what is measured. `measure` does the same for many parts at once: parts
of one shape and dtype are stacked and measured together, because a torch call on a small
tensor costs as much as one on thirty of them. Both give the same bits (test_measure.py);
what is not finite is measured alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from spmd_verify.layouts import Region
from spmd_verify.norms import (
    LARGEST_STACKED,
    as_real,
    can_be_stacked,
    deviation,
    is_rounding,
    row_sums,
    stacked,
)
from spmd_verify.reference.trajectory import same_bits
from spmd_verify.stored.store import Entry
from spmd_verify.ulp import finite_ulp_distance, ulp_distance


class Statistics(msgspec.Struct, kw_only=True):
    """What one copy of one part of one tensor says. Plain values: crosses process borders.

    Attributes:
        run: `free` or `anchored`.
        step: From 0.
        stage: See `verdict.STAGES`.
        name: First name in the reference.
        coordinates: Ranks that hold this copy, bit for bit.
        layout: In short, see `layouts.describe`.
        ranges: The part, per dim the half-open global ranges.
        numel: Elements of the part.
        is_exact: Equal to the reference bit for bit.
        squares: Sum of squared deviation from the float64 reference by local dim-0 row,
            float64 in native byte order; empty for an exact copy of a compared-by-bits value.
        power: Sum of squares of the float64 reference over the part.
        excess: `k - 1` of the factor k that fits this part best.
        unfitted: Sum of squares that this factor leaves. Sent besides `squares` because a
            residual taken from sums alone drowns in cancellation below 1e-8.
        non_finite: Elements that are NaN or inf where the reference is not.
        has_signal: Whether any element is not zero.
        worst_index: Global index of the element that deviates most, None if none does.
        actual: Its value here.
        expected: Its value in the reference.
        max_ulp: Largest distance from the reference, in ulp of the tensor's dtype.
        differing: Elements that are not equal to the reference's.
        digest: Of the bits of this copy; empty for an exact one.
        value: The number itself, for tensors of one element.
        problem: Why the tensor could not be compared, if it could not.
    """

    run: str
    step: int
    stage: str
    name: str
    coordinates: list[tuple[int, ...]]
    layout: str = ""
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    numel: int = 0
    is_exact: bool = False
    squares: bytes = b""
    power: float = 0.0
    excess: float = 0.0
    unfitted: float = 0.0
    non_finite: int = 0
    has_signal: bool = False
    worst_index: list[int] | None = None
    actual: float = 0.0
    expected: float = 0.0
    max_ulp: int = 0
    differing: int = 0
    digest: str = ""
    value: float | None = None
    problem: str | None = None


def statistics_of(
    local: Tensor, expected: Tensor, exact: Tensor, entry: Entry, run: str, part: Region
) -> Statistics:
    """Return the statistics of one local tensor against the same part of the reference.

    Args:
        local: This rank's part.
        expected: The reference's part, in the case's dtype.
        exact: The float64 reference's part.
        entry: The tensor in the reference.
        run: `free` or `anchored`.
        part: Where the part lies in the global tensor.
    """
    found = Statistics(
        run=run,
        step=entry.step,
        stage=entry.stage,
        name=entry.name,
        coordinates=[],
        ranges=part.ranges,
        numel=local.numel(),
        is_exact=same_bits(local, expected),
        has_signal=bool(local.any()),
    )
    if local.numel() == 1 and entry.value is not None:
        found.value = float(local)
    if found.is_exact and not is_rounding(expected):
        return found
    difference = deviation(local, exact, expected)
    finite = difference.isfinite()
    if not found.is_exact:
        found.digest = digest(local)
    found.non_finite = int((~finite).sum())
    clean = difference if not found.non_finite else difference.masked_fill(~finite, 0.0)
    shaped = clean.reshape(local.shape + clean.shape[local.ndim :])
    found.squares = _packed(_row_sums(shaped.square(), local))
    _add_fit(found, clean, exact)
    if not found.is_exact and local.numel():
        _add_worst(found, local, expected, part)
    return found


def digest(value: Tensor) -> str:
    """Return a short digest of the bits of a tensor, shape and dtype included."""
    raw = as_real(value.detach()).contiguous()
    content = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return _digest(value.shape, value.dtype, content)


def _digest(shape: Sequence[int], dtype: torch.dtype, content: bytes) -> str:
    """Return the digest of bits that have a shape and a dtype."""
    seed = f"{tuple(shape)}{dtype}".encode()
    return hashlib.blake2b(seed + content, digest_size=8).hexdigest()


def unpacked(rows: bytes) -> Tensor:
    """Return packed row sums as float64 [rows]."""
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(rows), dtype=torch.float64)


def _packed(rows: Tensor) -> bytes:
    """Return row sums as bytes in native order."""
    return rows.contiguous().numpy().tobytes()


def _row_sums(value: Tensor, local: Tensor) -> Tensor:
    """Return sums by dim-0 row of `local`, whose complex entries are [..., 2] in `value`."""
    if local.ndim == 0:
        return value.sum(dtype=torch.float64).reshape(1)
    return row_sums(value)


def _add_fit(found: Statistics, difference: Tensor, exact: Tensor) -> None:
    """Fill in the factor that fits this part best and what it leaves."""
    reference = as_real(exact).to(torch.float64).nan_to_num(posinf=0.0, neginf=0.0)
    found.power = float(reference.square().sum())
    if found.power > 0.0:
        found.excess = float((difference * reference).sum()) / found.power
    found.unfitted = float((difference - found.excess * reference).square().sum())


def _add_worst(found: Statistics, local: Tensor, expected: Tensor, part: Region) -> None:
    """Fill in the element that differs most from the reference, and the largest ulp."""
    left, right = as_real(local), as_real(expected)
    gap = (left.to(torch.float64) - right.to(torch.float64)).abs()
    gap = torch.where(left == right, 0.0, gap.nan_to_num(nan=torch.inf, posinf=torch.inf))
    flat = int(gap.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape)]
    found.differing = int((gap != 0).sum())
    found.actual = float(left[tuple(index)])
    found.expected = float(right[tuple(index)])
    found.worst_index = list(part.global_index(index[: len(part.ranges)]))
    if is_rounding(local) and left.dtype == right.dtype:
        found.max_ulp = int(ulp_distance(left, right).max())


@dataclass
class Task:
    """One part to measure.

    Attributes:
        local: This rank's part.
        expected: The reference's part, in the case's dtype.
        exact: The float64 reference's part.
        entry: The tensor in the reference.
        run: `free` or `anchored`.
        part: Where the part lies in the global tensor.
        found: What was measured, once it is.
    """

    local: Tensor
    expected: Tensor
    exact: Tensor
    entry: Entry
    run: str
    part: Region
    found: Statistics | None = None

    def alone(self) -> Statistics:
        """Measure this part by itself."""
        return statistics_of(self.local, self.expected, self.exact, self.entry, self.run, self.part)


def measure(tasks: Sequence[Task]) -> None:
    """Measure parts, those of one shape and dtype together; fills in `found`."""
    groups: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[Task]] = {}
    for task in tasks:
        if _can_be_stacked(task):
            kind = task.local.shape, task.local.dtype, task.exact.dtype
            groups.setdefault(kind, []).append(task)
        else:
            task.found = task.alone()
    for (shape, _, _), group in groups.items():
        size = len(group) if shape.numel() <= LARGEST_STACKED else 1
        for start in range(0, len(group), size):
            _measure_stacked(group[start : start + size])


def _can_be_stacked(task: Task) -> bool:
    """Say whether the sums of a part have the order they have in a stack."""
    local, expected, exact = task.local, task.expected, task.exact
    return (
        local.dtype == expected.dtype
        and local.shape == expected.shape == exact.shape
        and can_be_stacked(local, expected, exact)
    )


def _measure_stacked(tasks: Sequence[Task]) -> None:
    """Measure contiguous floating parts of one shape and dtype."""
    count, shape = len(tasks), tasks[0].local.shape
    local, expected, exact = (
        stacked([value.detach() for value in values])
        for values in zip(*((t.local, t.expected, t.exact) for t in tasks), strict=True)
    )
    wide, exact = local.to(torch.float64), exact.to(torch.float64)
    difference = wide - exact
    rows = shape[0] if shape else 1
    squares = difference.square().reshape(count, rows, -1).sum(2)
    power = exact.square().sum(1).tolist()
    dots = (difference * exact).sum(1).tolist()
    excess = [dot / p if p > 0.0 else 0.0 for dot, p in zip(dots, power, strict=True)]
    factors = torch.tensor(excess, dtype=torch.float64).unsqueeze(1)
    unfitted = (difference - factors * exact).square().sum(1).tolist()
    gap = (wide - expected.to(torch.float64)).abs()
    worst = gap.argmax(1)
    places = worst.unsqueeze(1)
    largest = gap.gather(1, places)[:, 0].tolist()
    actual = local.gather(1, places)[:, 0].tolist()
    wanted = expected.gather(1, places)[:, 0].tolist()
    differing = (gap != 0).sum(1).tolist()
    ulps = finite_ulp_distance(local, expected).amax(1).tolist()
    signal = (local != 0).any(1).tolist()
    bits = local.view(torch.uint8).numpy()
    totals, packed, worst_at = squares.sum(1).tolist(), squares.numpy(), worst.tolist()
    for i, task in enumerate(tasks):
        if not math.isfinite(totals[i] + power[i] + unfitted[i] + largest[i]):
            task.found = task.alone()
            continue
        found = task.found = _blank(task, is_exact=largest[i] == 0.0, has_signal=signal[i])
        found.squares = packed[i].tobytes()
        found.power, found.excess, found.unfitted = power[i], excess[i], unfitted[i]
        if task.entry.value is not None and task.local.numel() == 1:
            found.value = actual[i]
        if not found.is_exact:
            found.digest = _digest(shape, task.local.dtype, bits[i].tobytes())
            index = _unraveled(worst_at[i], shape)
            found.differing = differing[i]
            found.actual, found.expected, found.max_ulp = actual[i], wanted[i], ulps[i]
            found.worst_index = list(task.part.global_index(index))


def _unraveled(flat: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element by its place in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return index[::-1]


def _blank(task: Task, *, is_exact: bool, has_signal: bool) -> Statistics:
    """Return the statistics of a part before anything is added up."""
    return Statistics(
        run=task.run,
        step=task.entry.step,
        stage=task.entry.stage,
        name=task.entry.name,
        coordinates=[],
        ranges=task.part.ranges,
        numel=task.local.numel(),
        is_exact=is_exact,
        has_signal=has_signal,
    )
