"""Where the parts of a tensor are: placements, layouts and their index arithmetic.

A layout has one placement per mesh axis. `Shard` states the extent of every rank, so
uneven and empty parts are exact, and a factorisation of its dim, so that merging or
splitting dims in a view moves no data. Pure arithmetic on integers; torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmd.errors import LayoutError

ReduceOp = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """The middle factor of dim `dim`, seen as [outer, sum(units), inner], is split.

    Attributes:
        dim: Dim of the tensor, >= 0.
        units: Units each rank of the axis owns, in rank order; zeros are allowed. Where there
            are fewer than ranks, they repeat: rank i owns what rank i - len(units) owns.
        outer: Repetitions of the split factor to its left, within the same dim.
        inner: Elements of the dim per unit; folded into `units`, so always 1 afterwards:
            equal splits compare equal.
    """

    dim: int
    units: tuple[int, ...]
    outer: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        if self.inner != 1:
            object.__setattr__(self, "units", tuple(n * self.inner for n in self.units))
            object.__setattr__(self, "inner", 1)

    @property
    def size(self) -> int:
        """Global size of the dim, in elements."""
        return self.outer * sum(self.units)

    def local_sizes(self) -> tuple[int, ...]:
        """Local size of the dim for each rank, in elements; they repeat as the units do."""
        return tuple(self.outer * n for n in self.units)

    def offsets(self) -> tuple[int, ...]:
        """First unit of each rank; they repeat as the units do."""
        starts, total = [], 0
        for n in self.units:
            starts.append(total)
            total += n
        return tuple(starts)

    def moved(self, dim: int) -> Shard:
        """Return the same split of another dim."""
        return Shard(dim, self.units, self.outer)


@dataclass(frozen=True)
class Partial:
    """The value is `op` over the ranks of the axis.

    Attributes:
        op: The reduction.
        block: Over each so many consecutive ranks of the axis; 0 for all of them.
    """

    op: ReduceOp = "sum"
    block: int = 0


Placement = Replicate | Shard | Partial
REPLICATE = Replicate()


@dataclass(frozen=True)
class Layout:
    """One placement per mesh axis, in mesh order."""

    placements: tuple[Placement, ...]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(isinstance(p, Replicate) for p in self.placements)

    @property
    def has_partial(self) -> bool:
        """Whether a reduction over some axis is still due."""
        return any(isinstance(p, Partial) for p in self.placements)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """Return this layout with another placement on mesh axis `axis`."""
        return Layout((*self.placements[:axis], placement, *self.placements[axis + 1 :]))


def replicated(num_axes: int) -> Layout:
    """Return the layout that keeps the whole tensor on every rank of `num_axes` axes."""
    return Layout((REPLICATE,) * num_axes)


def chunk_units(size: int, num_ranks: int) -> tuple[int, ...]:
    """Split `size` elements over ranks: ceil(size / num_ranks) each until used up.

    The last parts may be shorter or empty. Source: the rule of torch.chunk, as DTensor's.
    """
    step = -(-size // num_ranks) if num_ranks else 0
    return tuple(max(0, min(step, size - step * rank)) for rank in range(num_ranks))


def shard(dim: int, size: int, num_ranks: int) -> Shard:
    """Return the torch.chunk split of a dim of `size` elements over one axis."""
    return Shard(dim, chunk_units(size, num_ranks))


def local_shape(
    global_shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of one rank's part of a global tensor.

    Args:
        global_shape: Sizes of the global tensor, in elements.
        layout: One placement per mesh axis; no dim is sharded by two axes.
        coordinate: The rank's index on every axis.

    Returns:
        Sizes of the local tensor, in elements; zero is possible.

    Raises:
        LayoutError: `layout`, if a shard does not add up to its dim.
    """
    shape = list(global_shape)
    for placement, index in zip(layout.placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            check_shard(global_shape, placement)
            sizes = placement.local_sizes()
            shape[placement.dim] = sizes[index % len(sizes)]
    return tuple(shape)


def check_shard(global_shape: tuple[int, ...], placement: Shard) -> None:
    """Raise LayoutError unless `placement` splits a dim of `global_shape` exactly."""
    if placement.dim >= len(global_shape):
        raise LayoutError(
            f"Cannot shard dim {placement.dim} of a tensor of shape {list(global_shape)}: it has "
            f"{len(global_shape)} dims. Shard one of them or replicate it.",
            "shard-dim-out-of-range",
        )
    if placement.size != global_shape[placement.dim]:
        raise LayoutError(
            f"Shard of dim {placement.dim} covers {placement.size} elements (outer "
            f"{placement.outer}, units {placement.units}), the tensor of "
            f"shape {list(global_shape)} has {global_shape[placement.dim]}. The units of all "
            "ranks must add up to the dim."
        )
