"""The checker's own shard arithmetic."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import Partial, Replicate, Shard

from spmd_verify import layouts
from spmd_verify.errors import InternalError
from spmd_verify.layouts import (
    Indexed,
    assemble,
    coordinates,
    describe,
    partial_axes,
    put_region,
    region,
    replicas,
    scatter,
    take,
    take_region,
)


@dataclass(frozen=True)
class Units:
    """A shard with explicit units, as the engine's."""

    dim: int
    units: tuple[int, ...]
    outer: int = 1
    inner: int = 1


@given(st.integers(0, 13), st.integers(1, 5), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_torch_shards_follow_the_rule_of_chunk(size: int, ranks: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = size
    value = torch.arange(3 * size).reshape(shape)
    chunks = list(value.chunk(ranks, dim)) if size else []
    for rank in range(ranks):
        own = take(value, (Shard(dim),), (ranks,), (rank,))
        expected = chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)
        assert torch.equal(own, expected)


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[int], tuple[object, ...], tuple[int, ...]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    free, placements = [0, 1], []
    for ranks in mesh:
        kind = draw(st.sampled_from(["replicate", "partial", "units", "chunk"]))
        if kind in ("replicate", "partial") or not free:
            placements.append(Partial() if kind == "partial" else Replicate())
            continue
        dim = free.pop(draw(st.integers(0, len(free) - 1)))
        if kind == "chunk":
            shape[dim] = draw(st.integers(0, 7))
            placements.append(Shard(dim))
            continue
        units = tuple(draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
        outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        shape[dim] = outer * sum(units) * inner
        placements.append(Units(dim, units, outer, inner))
    return shape, tuple(placements), mesh


@given(_layouts())
@settings(max_examples=150, deadline=None)
def test_scattered_parts_assemble_to_the_whole(case: tuple) -> None:
    shape, layout, mesh = case
    value = torch.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    parts = scatter(value, layout, mesh)
    assert torch.equal(assemble(parts, shape, layout, mesh), value)
    owned = sum(part.numel for part in replicas(shape, layout, mesh))
    assert owned == value.numel() or not value.numel()


@given(_layouts())
@settings(max_examples=100, deadline=None)
def test_global_indices_point_at_the_same_elements(case: tuple) -> None:
    shape, layout, mesh = case
    value = torch.arange(shape[0] * shape[1]).reshape(shape)
    for coordinate in coordinates(mesh):
        part = region(shape, layout, mesh, coordinate)
        local = take_region(value, part)
        assert tuple(local.shape) == part.shape
        for index in torch.cartesian_prod(*map(torch.arange, local.shape)).tolist():
            assert local[tuple(index)] == value[part.global_index(index)]


def test_merged_dims_are_split_in_their_middle_factor() -> None:
    value = torch.arange(12)  # [2, 3, 2] merged; the middle factor is split 2 + 1
    layout = (Units(0, (2, 1), outer=2, inner=2),)
    assert take(value, layout, (2,), (0,)).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert take(value, layout, (2,), (1,)).tolist() == [4, 5, 10, 11]


def test_two_axes_may_split_one_dim_from_left_to_right() -> None:
    value = torch.arange(8)
    layout = (Shard(0), Shard(0))
    parts = [take(value, layout, (2, 2), c).tolist() for c in coordinates((2, 2))]
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_slices_of_a_file_equal_slices_of_the_tensor(tmp_path: Path) -> None:
    value = torch.randn(12, 5)
    save_file({"x": value}, str(tmp_path / "x.safetensors"))
    layout = (Units(0, (1, 2), outer=2, inner=2), Shard(1))
    with safe_open(str(tmp_path / "x.safetensors"), framework="pt") as opened:
        for coordinate in coordinates((2, 2)):
            own = take(opened.get_slice("x"), layout, (2, 2), coordinate, shape=(12, 5))
            assert torch.equal(own, take(value, layout, (2, 2), coordinate))


def test_replicas_group_coordinates_by_what_they_own() -> None:
    groups = replicas((4,), (Replicate(), Shard(0)), (2, 2))
    assert sorted(groups.values()) == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_layouts_are_described_in_short() -> None:
    assert describe((Shard(1), Replicate(), Partial())) == "S(1),R,P(sum)"
    assert describe(None) == "?"
    assert describe((Indexed(0, (2, 0)),)) == "I(0)"
    assert partial_axes((Replicate(), Partial())) == (1,)
    assert partial_axes((Indexed(0, (2, 0)), layouts.Partial("max"))) == (1,)


@st.composite
def _deals(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], int]:
    """A shape, a dim of it dealt out to ranks in any order, and the dim."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    order = draw(st.permutations(range(shape[dim])))
    cut = draw(st.integers(0, shape[dim]))
    return shape, [tuple(order[:cut]), tuple(order[cut:])], dim


@given(_deals())
@settings(max_examples=150, deadline=None)
def test_indexed_parts_hold_their_indices_in_their_order(case: tuple) -> None:
    shape, deal, dim = case
    value = torch.arange(torch.tensor(shape).prod()).reshape(shape)
    together = torch.full_like(value, -1)
    for rank, indices in enumerate(deal):
        part = region(shape, (Indexed(dim, indices),), (2,), (rank,))
        local = take_region(value, part)
        assert tuple(local.shape) == part.shape
        assert torch.equal(local, value.index_select(dim, torch.tensor(indices).long()))
        for index in torch.cartesian_prod(*map(torch.arange, local.shape)).reshape(-1, len(shape)):
            assert local[tuple(index)] == value[part.global_index(index.tolist())]
        put_region(together, part, local)
    assert torch.equal(together, value)


def test_an_indexed_part_in_another_order_is_not_the_whole() -> None:
    assert region((3,), (Indexed(0, (0, 1, 2)),), (1,), (0,)).is_whole((3,))
    assert not region((3,), (Indexed(0, (2, 1, 0)),), (1,), (0,)).is_whole((3,))


def test_a_later_axis_splits_what_indices_left() -> None:
    value = torch.arange(8)
    layout = (Indexed(0, (6, 1, 3, 4)), Shard(0))
    parts = [take(value, layout, (2, 2), (0, i)).tolist() for i in range(2)]
    assert parts == [[6, 1], [3, 4]]


def test_indexed_slices_of_a_file_equal_slices_of_the_tensor(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    save_file({"x": value}, str(tmp_path / "x.safetensors"))
    layout = (Indexed(0, (5, 0, 1)), Indexed(1, (3, 1)))
    with safe_open(str(tmp_path / "x.safetensors"), framework="pt") as opened:
        own = take(opened.get_slice("x"), layout, (2, 2), (0, 0), shape=(6, 4))
    assert torch.equal(own, value[[5, 0, 1]][:, [3, 1]])


@pytest.mark.parametrize(
    "layout",
    [(Indexed(0, (4,)),), (Indexed(0, (-1,)),), (Indexed(0, (1, 1)),), (Indexed(2, (0,)),)],
)
def test_indices_that_do_not_fit_are_an_error(layout: tuple) -> None:
    with pytest.raises(InternalError, match="layout-arithmetic"):
        region((4, 4), layout, (2,), (0,))


def test_indices_are_global_so_their_axis_comes_first() -> None:
    with pytest.raises(InternalError, match="comes first"):
        region((4,), (Shard(0), Indexed(0, (0,))), (2, 2), (0, 0))


@pytest.mark.parametrize("layout", [(Shard(2),), (Units(0, (1, 2)),), (Units(0, (1, 1, 2)),), ()])
def test_a_layout_that_does_not_fit_is_an_error(layout: tuple) -> None:
    with pytest.raises(InternalError, match="layout-arithmetic"):
        region((4, 4), layout, (2,), (0,))
