"""Layout arithmetic against index sets: which element of the global tensor lies where.

A part is simulated by its elements' global positions, found by walking every index; nothing
of `spmd.layout` helps. Views, cuts and redistributions are then compared element by element.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd.emit import Emitter
from spmd.emulator import PerRank, run_lockstep
from spmd.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk_units,
    local_shape,
)
from spmd.lockstep import assembled
from spmd.mesh import MeshShape
from spmd.ranks import part_of
from spmd.redistribute import redistribute
from spmd.rules.cuts import cut, local_bounds
from spmd.rules.views import viewed

FIXED = settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MESHES = ((1,), (2,), (3,), (4,), (8,), (2, 2), (3, 2), (1, 4))


# -- the simulation ------------------------------------------------------------------------


def owner(placement: Shard, index: int) -> int:
    """Return the rank that owns an index of the split dim, counting units one by one."""
    unit = index % sum(placement.units)
    for rank, count in enumerate(placement.units):
        if unit < count:
            return rank
        unit -= count
    raise AssertionError("index outside the dim")


def elements(shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...]) -> list[int]:
    """Return the row-major positions of a rank's elements, in its local order."""
    found = []
    for position, index in enumerate(itertools.product(*(range(n) for n in shape))):
        placed = zip(layout.placements, coordinate, strict=True)
        if all(not isinstance(p, Shard) or owner(p, index[p.dim]) == c for p, c in placed):
            found.append(position)
    return found


def part(value: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """Return a rank's part of a global tensor by picking its elements."""
    mine = elements(tuple(value.shape), layout, coordinate)
    shape = local_shape(tuple(value.shape), layout, coordinate)
    return value.reshape(-1)[torch.tensor(mine, dtype=torch.long)].reshape(shape)


# -- strategies ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A shape on a mesh with two layouts."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    have: Layout
    wanted: Layout


@st.composite
def splits(draw: Any, dim: int, size: int, ranks: int) -> Shard:
    """Draw a split of `size` elements: even or not, with empty parts, repeated or not."""
    outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [1]))
    units = size // outer
    if draw(st.booleans()):
        return Shard(dim, chunk_units(units, ranks), outer)
    bounds = sorted(draw(st.lists(st.integers(0, units), min_size=ranks - 1, max_size=ranks - 1)))
    pairs = itertools.pairwise([0, *bounds, units])
    return Shard(dim, tuple(b - a for a, b in pairs), outer)


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], sizes: tuple[int, ...], partial: bool) -> Layout:
    """Draw one placement per axis; no dim twice."""
    placements: list[Placement] = []
    free = list(range(len(shape)))
    op = draw(st.sampled_from(("sum", "max", "min")))
    for ranks in sizes:
        kinds = ("shard", "replicate", "partial")
        kind = draw(st.sampled_from(kinds if partial else kinds[:2]))
        if kind == "shard" and free:
            dim = free.pop(draw(st.integers(0, len(free) - 1)))
            placements.append(draw(splits(dim, shape[dim], ranks)))
        else:
            placements.append(Partial(op) if kind == "partial" else Replicate())
    return Layout(tuple(placements))


def shapes(smallest: int = 1, dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Return the strategy of small shapes."""
    return st.lists(st.integers(smallest, 7), min_size=1, max_size=dims).map(tuple)


@st.composite
def moves(draw: Any) -> Placed:
    """Draw a shape, a mesh and two layouts; only the first may be partial."""
    shape, sizes = draw(shapes(smallest=0)), draw(st.sampled_from(MESHES))
    have, wanted = draw(layouts(shape, sizes, True)), draw(layouts(shape, sizes, False))
    return Placed(shape, sizes, have, wanted)


# -- parts ---------------------------------------------------------------------------------


@seed(1)
@FIXED
@given(moves())
def test_the_parts_of_a_layout_are_the_elements_their_ranks_own(placed: Placed) -> None:
    value = torch.arange(math.prod(placed.shape)).reshape(placed.shape)
    mesh = MeshShape(("a", "b")[: len(placed.sizes)], placed.sizes)
    parts = PerRank(part_of(value, placed.wanted, c) for c in mesh.coordinates())

    for own, coordinate in zip(parts, mesh.coordinates(), strict=True):
        assert torch.equal(own, part(value, placed.wanted, coordinate))
    assert torch.equal(assembled(parts, placed.wanted, mesh), value)


@seed(2)
@FIXED
@given(st.integers(0, 40), st.integers(1, 9))
def test_the_chunk_rule_is_that_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [len(c) for c in torch.arange(size).chunk(ranks)] if size else []

    assert chunk_units(size, ranks) == (*chunks, *[0] * (ranks - len(chunks)))


# -- views ---------------------------------------------------------------------------------


@st.composite
def reshapes(draw: Any) -> tuple[tuple[int, ...], Shard, tuple[int, ...]]:
    """Draw a shape, a split of one of its dims and another shape of as many elements."""
    factors = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))

    def grouped() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=4)))
        pairs = itertools.pairwise([0, *cuts, len(factors)])
        return tuple(math.prod(factors[a:b]) for a, b in pairs)

    shape, out = grouped(), grouped()
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, draw(splits(dim, shape[dim], draw(st.integers(1, 5)))), out


@seed(3)
@settings(FIXED, max_examples=600)
@given(reshapes())
def test_a_viewed_split_owns_the_same_elements_in_the_same_order(drawn: Any) -> None:
    shape, placement, out = drawn
    moved = viewed(placement, shape, out)
    if moved is None:
        return

    for rank in range(len(placement.units)):
        before = elements(shape, Layout((placement,)), (rank,))
        assert elements(out, Layout((moved,)), (rank,)) == before


@seed(4)
@FIXED
@given(reshapes())
def test_a_split_survives_merging_its_dim_and_comes_back(drawn: Any) -> None:
    shape, placement, _ = drawn
    if math.gcd(*placement.units) == 0:
        return
    merged = viewed(placement, shape, (math.prod(shape),))

    assert merged is not None
    assert viewed(merged, (math.prod(shape),), shape) is not None


# -- cuts ----------------------------------------------------------------------------------


@seed(5)
@settings(FIXED, max_examples=600)
@given(st.data())
def test_a_cut_owns_what_its_ranks_had_of_the_piece(data: st.DataObject) -> None:
    size, ranks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    placement = data.draw(splits(0, size, ranks))
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    piece = cut(placement, start, end)
    if piece is None:
        return

    assert piece.size == end - start
    lows, highs = local_bounds(placement, start, end)
    for rank in range(ranks):
        whole = elements((size,), Layout((placement,)), (rank,))
        mine = [start + i for i in elements((end - start,), Layout((piece,)), (rank,))]
        assert whole[lows[rank] : highs[rank]] == mine
        assert mine == [i for i in whole if start <= i < end]


# -- redistribution ------------------------------------------------------------------------


@seed(6)
@FIXED
@given(moves())
def test_redistribution_gives_every_rank_its_elements(placed: Placed) -> None:
    value = torch.arange(math.prod(placed.shape), dtype=torch.float64).reshape(placed.shape) + 1
    mesh = MeshShape(("a", "b")[: len(placed.sizes)], placed.sizes)
    have = placed.have.placements
    whole = Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in have))
    factors = _factors(placed, mesh)
    parts = PerRank(
        part(value, whole, c) * f for c, f in zip(mesh.coordinates(), factors, strict=True)
    )
    ops = {p.op for p in have if isinstance(p, Partial)}
    own = set(factors)
    wanted = (
        value * {"sum": sum(own), "max": max(own), "min": min(own)}[ops.pop() if ops else "max"]
    )

    moved = _redistributed(placed, mesh, parts)

    for rank, coordinate in enumerate(mesh.coordinates()):
        actual = moved[rank] if isinstance(moved, PerRank) else moved
        assert torch.equal(actual, part(wanted, placed.wanted, coordinate))


def _factors(placed: Placed, mesh: MeshShape) -> list[int]:
    """Return, per rank, 1 + its number among the ranks whose values are reduced with its."""
    axes = [a for a, p in enumerate(placed.have.placements) if isinstance(p, Partial)]
    found = []
    for coordinate in mesh.coordinates():
        number = 0
        for axis in axes:
            number = number * placed.sizes[axis] + coordinate[axis]
        found.append(1 + number)
    return found


def _redistributed(placed: Placed, mesh: MeshShape, parts: PerRank) -> Any:
    """Run the redistribution of one input as a local graph on every rank."""
    source = torch.fx.Graph().placeholder("x")
    source.meta["val"] = torch.empty(placed.shape, dtype=torch.float64, device="meta")
    emitter = Emitter(mesh)
    emitter.enter(source)
    node = emitter.placeholder(source, placed.have)

    class Value:
        shape, dtype = placed.shape, torch.float64

    steps = redistribute(emitter, node, Value(), placed.have, placed.wanted)
    assert [layout for layout, _ in steps][-1:] in ([placed.wanted], [])
    emitter.output([steps[-1][1] if steps else node])
    return run_lockstep(emitter.finish(), [parts], mesh)[0]
