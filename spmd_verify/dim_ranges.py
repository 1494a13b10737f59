"""Which indices of one dim a rank owns, as half-open ranges in local order.

The arithmetic of one dim below `layouts`; numbers only, no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """How one mesh axis splits one dim, seen from one rank of that axis.

    Attributes:
        units: Units of every rank, or empty for the rule of torch.chunk.
        outer: Repetitions of the split factor to its left.
        inner: Elements per unit.
        num_ranks: Size of the mesh axis.
        index: This rank's index on it.
        indices: What this rank has, in its order, instead of consecutive units.
    """

    units: tuple[int, ...]
    outer: int
    inner: int
    num_ranks: int
    index: int
    indices: tuple[int, ...] | None = None


@lru_cache(maxsize=8192)
def owned(size: int, splits: tuple[Split, ...]) -> Ranges:
    """Return the ranges of a dim of `size` elements that remain after `splits`.

    Raises:
        ValueError: If the units of a split do not add up to what it splits, or indices are
            outside of it or given twice.
    """
    ranges: Ranges = ((0, size),)
    for split in splits:
        ranges = _compose(ranges, _split_ranges(length(ranges), split))
    return ranges


def length(ranges: Iterable[tuple[int, int]]) -> int:
    """Count the elements of ranges."""
    return sum(high - low for low, high in ranges)


def locate(ranges: Ranges, index: int) -> int:
    """Return the global index of the local `index` within one dim."""
    for low, high in ranges:
        if index < high - low:
            return low + index
        index -= high - low
    raise IndexError(f"index {index} is past the end of {ranges}")


def with_offsets(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Pair each range with its first local index."""
    starts = itertools.accumulate((high - low for low, high in ranges), initial=0)
    return [(low, high, at) for (low, high), at in zip(ranges, starts, strict=False)]


def _split_ranges(size: int, split: Split) -> Ranges:
    """Return the ranges of [0, size) that the rank of `split` owns, merged, in local order."""
    if split.indices is not None:
        return _index_ranges(size, split.indices)
    units = split.units or _chunk_units(size, split)
    if split.outer * sum(units) * split.inner != size:
        raise ValueError(
            f"units {units} (outer {split.outer}, inner {split.inner}) do not add up to {size}"
        )
    start, count, total = sum(units[: split.index]), units[split.index], sum(units)
    if not count:
        return ()
    period, low = total * split.inner, start * split.inner
    ranges = [
        (turn * period + low, turn * period + low + count * split.inner)
        for turn in range(split.outer)
    ]
    return _merged(ranges)


def _index_ranges(size: int, indices: tuple[int, ...]) -> Ranges:
    """Return indices of [0, size) as ranges in their order."""
    outside = [index for index in indices if not 0 <= index < size]
    if outside:
        raise ValueError(f"index {outside[0]} is outside of {size} elements")
    if len(set(indices)) < len(indices):
        raise ValueError("an index is given twice")
    return _merged([(index, index + 1) for index in indices])


def _chunk_units(size: int, split: Split) -> tuple[int, ...]:
    """Split `size` elements over ranks: ceil(size / ranks) each until used up."""
    total, remainder = divmod(size, split.outer * split.inner)
    if remainder:
        raise ValueError(f"{size} elements are no multiple of {split.outer} x {split.inner}")
    step = -(-total // split.num_ranks)
    return tuple(max(0, min(step, total - step * i)) for i in range(split.num_ranks))


def _compose(ranges: Ranges, inner: Ranges) -> Ranges:
    """Return `inner`, ranges of local indices of `ranges`, in global indices."""
    if ranges and len(ranges) == 1:
        base = ranges[0][0]
        return tuple((base + low, base + high) for low, high in inner)
    found = []
    for low, high in inner:
        for start, stop, at in with_offsets(ranges):
            first, last = max(low, at), min(high, at + stop - start)
            if first < last:
                found.append((start + first - at, start + last - at))
    return _merged(found)


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Join ranges that touch."""
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return tuple(joined)
