"""The checker's own shard arithmetic: which elements of a global tensor a coordinate owns.

Shares no code with `spmd`, so that a fault there cannot hide here. A layout is one placement
per mesh axis, in mesh order (or an object with them in `placements`); placements are read by
their attributes: `dim` makes a shard, with `indices` or `units`, `outer` and `inner` where given
and the rule of torch.chunk where not; a class named `Partial` is a pending reduction; everything
else replicates. The classes here are the placements that the checker makes itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from spmd_verify.dim_ranges import Ranges, Split, length, locate, owned, with_offsets
from spmd_verify.errors import InternalError

Coordinate = tuple[int, ...]


class Sliceable(Protocol):
    """A tensor, or a slice of a safetensors file: `[slice, ...]` gives a tensor."""

    def __getitem__(self, key: Any) -> Tensor: ...


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis has the whole."""


@dataclass(frozen=True)
class Shard:
    """A dim in consecutive parts; see docs/design.md 2.1.

    Attributes:
        dim: Which.
        units: Units of every rank of the axis, or empty for the rule of torch.chunk; where
            there are fewer than ranks, they repeat.
        outer: Repetitions of the split factor to its left.
        inner: Elements per unit.
    """

    dim: int
    units: tuple[int, ...] = ()
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Strided:
    """A dim in consecutive parts of what later axes of the mesh left of it.

    Attributes:
        dim: Which.
        split_factor: Ranks of those axes.
    """

    dim: int
    split_factor: int


@dataclass(frozen=True)
class Indexed:
    """A dim of which this rank has these indices, in this order: interleaved or packed parts.

    The layout of every rank has its own. They are of the global tensor, so where several axes
    split the dim, this one comes first.

    Attributes:
        dim: Which.
        indices: Global indices, each at most once; may be empty.
    """

    dim: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Partial:
    """The value is what `op` (`sum`, `avg`, `max`, `min`) makes of the ranks of the axis."""

    op: str = "sum"


@dataclass(frozen=True)
class Region:
    """The part of a global tensor that one coordinate owns.

    Attributes:
        ranges: Per dim, the half-open index ranges owned, in local order, which need not be
            the global one. A 0-dim tensor has no dims and is owned whole.
    """

    ranges: tuple[Ranges, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Local sizes, in elements; zero is possible."""
        return tuple(length(ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        """Elements owned."""
        return math.prod(self.shape)

    def global_index(self, local_index: Sequence[int]) -> tuple[int, ...]:
        """Translate one local index into an index of the global tensor."""
        return tuple(
            locate(ranges, index) for ranges, index in zip(self.ranges, local_index, strict=True)
        )

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Say whether this is the whole of a global tensor of `shape`, in its order."""
        return self.shape == tuple(shape) and all(len(ranges) <= 1 for ranges in self.ranges)


def placements_of(layout: Any) -> tuple[Any, ...]:
    """Return the placements of a layout object or of a plain sequence."""
    return tuple(getattr(layout, "placements", layout))


def is_partial(placement: Any) -> bool:
    """Say whether a reduction over the axis is still due."""
    return type(placement).__name__ in ("Partial", "_Partial", "_NormPartial", "_MaskPartial")


def is_sharded(placement: Any) -> bool:
    """Say whether the axis splits a dim."""
    return hasattr(placement, "dim") and not is_partial(placement)


def partial_axes(layout: Any) -> tuple[int, ...]:
    """Return the mesh axes over which a reduction is still due."""
    return tuple(i for i, placement in enumerate(placements_of(layout)) if is_partial(placement))


def reduce_op(placement: Any) -> str:
    """Return the operation of a partial placement: `sum`, `max`, `min`, `avg`, ..."""
    return str(getattr(placement, "op", getattr(placement, "reduce_op", "sum")))


def combine(values: Sequence[Tensor], operation: str) -> Tensor:
    """Reduce equal-shaped tensors as the operation of a partial placement says.

    Raises:
        InternalError: `layout-arithmetic`, for another operation than sum, avg, max and min.
    """
    stacked = torch.stack(list(values))
    if operation == "max":
        return stacked.amax(0)
    if operation == "min":
        return stacked.amin(0)
    if operation not in ("sum", "avg"):
        raise InternalError(
            f"A partial placement has an unknown operation: {operation!r}. Expected sum, avg, "
            f"max or min. Please report this",
            slug="layout-arithmetic",
        )
    total = stacked.sum(0)
    return total / len(values) if operation == "avg" else total


def describe(layout: Any) -> str:
    """Return a layout in short: `S(0),R` or `P(sum)`; `?` where none was declared."""
    if layout is None:
        return "?"
    return ",".join(_describe_one(placement) for placement in placements_of(layout))


def coordinates(mesh_shape: Sequence[int]) -> Iterator[Coordinate]:
    """Give every coordinate of a mesh, the last axis fastest (rank order)."""
    return itertools.product(*(range(size) for size in mesh_shape))


def region(
    global_shape: Sequence[int], layout: Any, mesh_shape: Sequence[int], coordinate: Coordinate
) -> Region:
    """Return what `coordinate` owns of a global tensor.

    Axes apply from left to right, so two axes may split the same dim; the second then splits
    what the first left. Replicate and Partial own the whole.

    Args:
        global_shape: Sizes of the global tensor, in elements.
        layout: One placement per mesh axis.
        mesh_shape: Ranks along each axis, each >= 1.
        coordinate: 0 <= coordinate[i] < mesh_shape[i].

    Raises:
        InternalError: `layout-arithmetic`, if the placements do not fit the shape or mesh.

    Source of the chunk rule: torch.chunk; agrees with torch.distributed.tensor 2.13
    (test_layouts.py compares them).
    """
    placements = placements_of(layout)
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise _misfit(global_shape, layout, mesh_shape, "one placement per mesh axis is needed")
    splits: list[list[Split]] = [[] for _ in global_shape]
    for axis in _in_order(placements):
        placement, size, index = placements[axis], mesh_shape[axis], coordinate[axis]
        if not -len(global_shape) <= placement.dim < len(global_shape):
            raise _misfit(global_shape, layout, mesh_shape, f"there is no dim {placement.dim}")
        if hasattr(placement, "split_factor"):
            before = math.prod(split.num_ranks for split in splits[placement.dim])
            if before != placement.split_factor:
                raise _misfit(global_shape, layout, mesh_shape, "a strided shard of other axes")
        units = tuple(getattr(placement, "units", ()))
        if units and size % len(units):
            raise _misfit(global_shape, layout, mesh_shape, f"{len(units)} units, {size} ranks")
        if units:
            size, index = len(units), index % len(units)
        outer, inner = getattr(placement, "outer", 1), getattr(placement, "inner", 1)
        indices = getattr(placement, "indices", None)
        if indices is not None and splits[placement.dim]:
            raise _misfit(global_shape, layout, mesh_shape, "an axis with indices comes first")
        indices = None if indices is None else tuple(indices)
        splits[placement.dim].append(Split(units, outer, inner, size, index, indices))
    try:
        return Region(
            tuple(
                owned(size, tuple(dim_splits))
                for size, dim_splits in zip(global_shape, splits, strict=True)
            )
        )
    except ValueError as error:
        raise _misfit(global_shape, layout, mesh_shape, str(error)) from error


def _in_order(placements: Sequence[Any]) -> list[int]:
    """Return the sharding axes in the order in which they split.

    That of the mesh; but a strided shard splits what later axes left (fully_shard of what is
    tensor-parallel already). Source: torch.distributed.tensor 2.13, `_StridedShard`.
    """
    sharding = [axis for axis, placement in enumerate(placements) if is_sharded(placement)]
    strided = [axis for axis in sharding if hasattr(placements[axis], "split_factor")]
    return [axis for axis in sharding if axis not in strided] + strided[::-1]


def take(
    source: Tensor | Sliceable,
    layout: Any,
    mesh_shape: Sequence[int],
    coordinate: Coordinate,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the local part of a global tensor.

    Args:
        source: Global tensor [...], or a safetensors slice of one; of the latter only the
            bytes between the first and last owned row of each dim are read.
        layout: One placement per mesh axis.
        mesh_shape: Ranks along each axis.
        coordinate: The rank's position.
        shape: Global sizes; needed when `source` has no `shape`.

    Returns:
        The local tensor; a view where one range per dim is owned of a tensor.
    """
    sizes = tuple(source.shape) if isinstance(source, Tensor) else tuple(shape or ())
    return take_region(source, region(sizes, layout, mesh_shape, coordinate))


def take_region(source: Tensor | Sliceable, part: Region) -> Tensor:
    """Return the elements of `part` from a global tensor or a safetensors slice of it."""
    if not part.ranges:
        return source if isinstance(source, Tensor) else source[...]
    starts = [min((low for low, _ in ranges), default=0) for ranges in part.ranges]
    stops = [max((high for _, high in ranges), default=0) for ranges in part.ranges]
    taken = source[tuple(map(slice, starts, stops))]
    for dim, ranges in enumerate(part.ranges):
        if len(ranges) > 1:
            start = starts[dim]
            pieces = [taken.narrow(dim, low - start, high - low) for low, high in ranges]
            taken = torch.cat(pieces, dim)
    return taken


def replicas(
    global_shape: Sequence[int], layout: Any, mesh_shape: Sequence[int]
) -> dict[Region, list[Coordinate]]:
    """Group the coordinates of a mesh by what they own: each group holds equal copies."""
    groups: dict[Region, list[Coordinate]] = {}
    for coordinate in coordinates(mesh_shape):
        part = region(global_shape, layout, mesh_shape, coordinate)
        groups.setdefault(part, []).append(coordinate)
    return groups


def scatter(value: Tensor, layout: Any, mesh_shape: Sequence[int]) -> dict[Coordinate, Tensor]:
    """Return every rank's copy of its local part; for tests.

    A partial sum is laid out as the value on index 0 of the axis and zeros elsewhere.
    """
    parts: dict[Coordinate, Tensor] = {}
    axes = partial_axes(layout)
    for coordinate in coordinates(mesh_shape):
        local = take(value, layout, mesh_shape, coordinate).clone()
        parts[coordinate] = local if all(coordinate[i] == 0 for i in axes) else local * 0
    return parts


def assemble(
    parts: Mapping[Coordinate, Tensor],
    global_shape: Sequence[int],
    layout: Any,
    mesh_shape: Sequence[int],
) -> Tensor:
    """Return the global tensor from local parts; of equal copies the first is taken."""
    first = next(iter(parts.values()))
    value = torch.zeros(tuple(global_shape), dtype=first.dtype)
    for part, owners in replicas(global_shape, layout, mesh_shape).items():
        put_region(value, part, parts[owners[0]])
    return value


def put_region(value: Tensor, part: Region, local: Tensor) -> None:
    """Write a local tensor into its place in the global tensor, in place."""
    if not part.ranges:
        value.copy_(local)
        return
    offsets = [with_offsets(ranges) for ranges in part.ranges]
    for block in itertools.product(*offsets):
        target = tuple(slice(low, high) for low, high, _ in block)
        origin = tuple(slice(at, at + high - low) for low, high, at in block)
        value[target] = local[origin]


def _describe_one(placement: Any) -> str:
    """Return one placement in short."""
    if is_partial(placement):
        return f"P({reduce_op(placement)})"
    if not is_sharded(placement):
        return "R"
    if hasattr(placement, "indices"):
        return f"I({placement.dim})"
    outer, inner = getattr(placement, "outer", 1), getattr(placement, "inner", 1)
    return f"S({placement.dim})" if outer == inner == 1 else f"S({placement.dim};{outer}x{inner})"


def _misfit(
    shape: Sequence[int], layout: Any, mesh_shape: Sequence[int], why: str
) -> InternalError:
    """Return the error for a layout that does not fit a tensor."""
    return InternalError(
        f"A layout does not fit its tensor: shape {list(shape)}, layout {describe(layout)}, "
        f"mesh {list(mesh_shape)}. Got a misfit: {why}. This is a fault of the style or of "
        f"spmd-verify: please report it",
        slug="layout-arithmetic",
    )
