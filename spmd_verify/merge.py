"""Add up the statistics of all ranks into one view of each global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmd_verify.measure import Statistics, unpacked
from spmd_verify.norms import num_rows

TensorKey = tuple[str, int, str, str]  # run, step, stage, name


@dataclass
class Merged:
    """One global tensor of the candidate against the reference.

    Of several copies of one part, the one that deviates most counts.

    Attributes:
        layout: In short.
        is_exact: Every copy of every part has the reference's bits.
        squares: Squared deviation from the float64 reference by global dim-0 row [rows].
        fits: Per part `(power, excess, unfitted)`, see `Statistics`.
        non_finite: Elements that are NaN or inf only here.
        has_signal: Whether any element is not zero.
        worst: The statistics that hold the worst element, if any deviates.
        max_ulp: Largest distance from the reference, in ulp.
        differing: Elements that are not equal to the reference's.
        copies_differ: Two ranks hold other bits for the same part.
        ranks: Coordinates whose copy is not exact.
        covered: Elements seen, each part once.
        values: Per coordinate, the number itself, for tensors of one element.
        problems: Why parts could not be compared.
    """

    layout: str = ""
    is_exact: bool = True
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    fits: list[tuple[float, float, float]] = field(default_factory=list)
    non_finite: int = 0
    has_signal: bool = False
    worst: Statistics | None = None
    max_ulp: int = 0
    differing: int = 0
    copies_differ: bool = False
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    covered: int = 0
    values: dict[tuple[int, ...], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def by_tensor(statistics: Iterable[Statistics]) -> dict[TensorKey, list[Statistics]]:
    """Group the statistics of all ranks by tensor."""
    found: dict[TensorKey, list[Statistics]] = {}
    for entry in statistics:
        found.setdefault((entry.run, entry.step, entry.stage, entry.name), []).append(entry)
    return found


def merge(shape: Sequence[int], statistics: Sequence[Statistics]) -> Merged:
    """Return one view of a tensor.

    Args:
        shape: Its global sizes.
        statistics: Of all ranks, not empty.
    """
    merged = Merged(layout=statistics[0].layout)
    rows = num_rows(list(shape))
    merged.squares = torch.zeros(rows, dtype=torch.float64)
    parts: dict[object, list[Statistics]] = {}
    for entry in statistics:
        if entry.problem is not None:
            merged.is_exact = False
            merged.problems.append(entry.problem)
            merged.ranks.extend(entry.coordinates)
            merged.worst = merged.worst or (entry if entry.worst_index is not None else None)
        else:
            parts.setdefault(_plain(entry.ranges), []).append(entry)
    for copies in parts.values():
        _add_part(merged, shape, copies)
    merged.ranks.sort()
    return merged


def fit_factor(merged: Merged) -> tuple[float, float] | None:
    """Return `(k - 1, residual norm)` of the factor k that fits a tensor best.

    Parts fitted on their own combine exactly: what a common factor leaves of a part is what
    its own factor leaves plus `(k - k_part)^2` times its power, because the two are orthogonal.

    Returns:
        None where the reference is zero.
    """
    power = math.fsum(part for part, _, _ in merged.fits)
    if power == 0.0:
        return None
    excess = math.fsum(part * own for part, own, _ in merged.fits) / power
    left = math.fsum(unfitted + (excess - own) ** 2 * part for part, own, unfitted in merged.fits)
    return excess, math.sqrt(left)


def _add_part(merged: Merged, shape: Sequence[int], copies: list[Statistics]) -> None:
    """Take in all copies of one part."""
    digests = {entry.digest for entry in copies if entry.numel}
    merged.copies_differ |= len(digests) > 1
    merged.covered += copies[0].numel
    merged.differing += max(entry.differing for entry in copies)
    for entry in copies:
        merged.non_finite += entry.non_finite
        merged.has_signal |= entry.has_signal
        merged.max_ulp = max(merged.max_ulp, entry.max_ulp)
        if entry.value is not None:
            merged.values.update(dict.fromkeys(map(tuple, entry.coordinates), entry.value))
        if not entry.is_exact:
            merged.is_exact = False
            merged.ranks.extend(tuple(coordinate) for coordinate in entry.coordinates)
            if entry.worst_index is not None and _gap(entry) > _gap(merged.worst):
                merged.worst = entry
    chosen = copies[0]
    if len({(entry.non_finite, entry.squares) for entry in copies}) > 1:
        chosen = max(copies, key=lambda one: (one.non_finite, float(unpacked(one.squares).sum())))
    merged.fits.append((chosen.power, chosen.excess, chosen.unfitted))
    squares = unpacked(chosen.squares)
    if len(squares) == len(merged.squares) and (not shape or len(chosen.ranges[0]) == 1):
        merged.squares += squares  # all rows, in order
    elif squares.numel():
        merged.squares.index_add_(0, _global_rows(chosen, shape), squares)


def _global_rows(entry: Statistics, shape: Sequence[int]) -> Tensor:
    """Return the global dim-0 rows of a part, int64 [local rows]."""
    if not shape:
        return torch.zeros(1, dtype=torch.int64)
    return torch.cat([torch.arange(low, high) for low, high in entry.ranges[0]])


def _gap(entry: Statistics | None) -> float:
    """Return how far the worst element of some statistics is off; -1 for none."""
    if entry is None:
        return -1.0
    gap = abs(entry.actual - entry.expected)
    return math.inf if math.isnan(gap) else gap


def _plain(ranges: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return ranges as tuples whatever a message made of them."""
    return tuple(tuple(tuple(pair) for pair in dim) for dim in ranges)
