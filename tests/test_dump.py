"""Dumps on disk: what is written is read back, and nothing damaged or contradictory is read."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from spmd_verify.dumps import dump
from spmd_verify.dumps.dump import Entry
from spmd_verify.dumps.format import DumpError, Key
from spmd_verify.errors import UsageError
from spmd_verify.layouts import Indexed, Partial, Replicate, Shard, Strided, coordinates, scatter

W = "free|0|parameters|w"


def write(
    folder: Path,
    parts: Mapping[tuple[int, ...], Mapping[str, Entry]],
    axes: Mapping[str, int],
) -> Path:
    """Write a dump from the entries of every coordinate, in rank order."""
    for rank, (coordinate, entries) in enumerate(parts.items()):
        dump.write_rank(
            folder,
            rank=rank,
            world_size=math.prod(axes.values()),
            axes=axes,
            coordinate=coordinate,
            entries=entries,
        )
    return folder


def write_laid_out(folder: Path, value: Tensor, layout: tuple, axes: Mapping[str, int]) -> Path:
    """Write one global tensor under one layout."""
    parts = scatter(value, layout, tuple(axes.values()))
    return write(
        folder, {at: {W: Entry(part, value.shape, layout)} for at, part in parts.items()}, axes
    )


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[Tensor, tuple, dict[str, int]]:
    axes = dict(
        zip(("dp", "tp"), draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)), strict=False)
    )
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    layout = tuple(
        draw(
            st.sampled_from(
                [Replicate(), Partial(), *(Shard(dim - len(shape)) for dim in range(len(shape)))]
            )
        )
        for _ in axes
    )
    dtype = draw(
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64]
        )
    )
    value = torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dtype)
    return value, layout, axes


@given(_tensors())
@settings(max_examples=80, deadline=None)
def test_a_tensor_is_read_back_whole(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Tensor, tuple, dict[str, int]]
) -> None:
    value, layout, axes = case
    opened = dump.read(write_laid_out(tmp_path_factory.mktemp("dump"), value, layout, axes))
    assert opened.keys() == [W]
    assert opened.axes == axes
    assert opened.shape(W) == tuple(value.shape)
    assert opened.global_tensor(W).dtype == value.dtype
    assert torch.equal(opened.global_tensor(W), value)
    for at, part in scatter(value, layout, tuple(axes.values())).items():
        assert torch.equal(opened.locals(W)[at], part)


def test_layouts_survive_with_units_and_indices(tmp_path: Path) -> None:
    value = torch.arange(12.0)
    units = (Shard(0, (2, 1), outer=2, inner=2),)
    opened = dump.read(write_laid_out(tmp_path / "units", value, units, {"dp": 2}))
    assert opened.layout(W, (1,)) == units
    deal = [(5, 0, 3), (4, 1, 2)]
    parts = {
        (rank,): {W: Entry(value[:6][list(own)], (6,), (Indexed(0, own),))}
        for rank, own in enumerate(deal)
    }
    opened = dump.read(write(tmp_path / "indices", parts, {"dp": 2}))
    assert [opened.layout(W, (rank,)) for rank in range(2)] == [(Indexed(0, own),) for own in deal]
    assert torch.equal(opened.global_tensor(W), value[:6])


def test_keys_come_in_the_order_written_and_read_as_parts(tmp_path: Path) -> None:
    keys = ["free|0|loss|loss", "free|0|gradients|b|x", "free|0|gradients|a"]
    entries = {key: Entry(torch.ones(1), (1,), (Replicate(),)) for key in keys}
    assert dump.read(write(tmp_path, {(0,): entries}, {"dp": 1})).keys() == keys
    assert Key.of(keys[1]) == ("free", 0, "gradients", "b|x")
    assert str(Key.of(keys[1])) == keys[1]
    assert Key.of("fc.weight") == ("free", 0, "parameters", "fc.weight")


def test_a_single_file_is_one_rank_with_whole_tensors(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 3)}, str(tmp_path / "a.safetensors"))
    opened = dump.read(tmp_path / "a.safetensors")
    assert opened.axes == {}
    assert opened.shape("fc.weight") == (2, 3)
    assert torch.equal(opened.global_tensor("fc.weight"), torch.ones(2, 3))


def test_a_rank_may_lack_tensors(tmp_path: Path) -> None:
    one = {W: Entry(torch.ones(2), (2,), (Replicate(),))}
    other = {"free|0|parameters|v": Entry(torch.zeros(2), (2,), (Replicate(),))}
    opened = dump.read(write(tmp_path, {(0,): one, (1,): other}, {"pp": 2}))
    assert list(opened.locals(W)) == [(0,)]
    assert torch.equal(opened.global_tensor("free|0|parameters|v"), torch.zeros(2))


def test_equal_tensors_and_views_are_written_each_for_itself(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    entries = {
        f"free|0|parameters|{i}": Entry(part, part.shape, ())
        for i, part in enumerate([base, base[2:4], base, base.reshape(2, 4).T])
    }
    opened = dump.read(write(tmp_path, {(): entries}, {}))
    for key, entry in entries.items():
        assert torch.equal(opened.global_tensor(key), entry.local)


def test_a_layout_may_be_declared_later(tmp_path: Path) -> None:
    parts = {(i,): {W: Entry(torch.full((2,), float(i)))} for i in range(2)}
    opened = dump.read(write(tmp_path, parts, {"dp": 2}))
    assert opened.shape(W) is None
    with pytest.raises(DumpError, match="dump-no-layout"):
        opened.global_tensor(W)
    opened.declare(W, (4,), dict.fromkeys(coordinates((2,)), (Shard(0),)))
    assert opened.global_tensor(W).tolist() == [0, 0, 1, 1]
    with pytest.raises(DumpError, match="dump-layout"):
        opened.declare(W, (5,), {(0,): (Shard(0),)})


def _two_ranks(folder: Path) -> Path:
    return write_laid_out(folder, torch.arange(4.0), (Shard(0),), {"dp": 2})


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda at: [each.unlink() for each in at.iterdir()], "dump-missing"),
    "a rank that did not finish": (lambda at: (at / "rank-00001.json").unlink(), "missing-rank"),
    "tensors gone": (lambda at: (at / "rank-00001.safetensors").unlink(), "dump-unreadable"),
    "truncated tensors": (lambda at: _cut(at / "rank-00001.safetensors", -4), "dump-unreadable"),
    "truncated header": (lambda at: _cut(at / "rank-00001.safetensors", 5), "dump-unreadable"),
    "empty file": (lambda at: _cut(at / "rank-00001.safetensors", 0), "dump-unreadable"),
    "truncated json": (lambda at: _cut(at / "rank-00000.json", 40), "dump-unreadable"),
    "json without schema": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.pop("schema")),
        "dump-unreadable",
    ),
    "newer schema": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.update(schema=2)),
        "dump-too-new",
    ),
    "no axes": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.pop("axes")),
        "dump-unreadable",
    ),
    "text for a coordinate": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.update(coordinate=["a"])),
        "dump-unreadable",
    ),
    "coordinate off the mesh": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.update(coordinate=[2])),
        "dump-mesh",
    ),
    "a coordinate twice": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.update(coordinate=[1])),
        "dump-mesh",
    ),
    "other mesh": (
        lambda at: _edit(at / "rank-00000.json", lambda j: j.update(axes={"tp": 2})),
        "dump-disagrees",
    ),
    "other shape": (
        lambda at: _edit(at / "rank-00001.json", lambda j: j["tensors"][W].update(shape=[3, 2])),
        "dump-disagrees",
    ),
    "no such placement": (
        lambda at: _edit(
            at / "rank-00001.json", lambda j: j["tensors"][W].update(layout=["whole"])
        ),
        "dump-layout",
    ),
    "placements for other axes": (
        lambda at: _edit(at / "rank-00001.json", lambda j: j["tensors"][W].update(layout=[])),
        "dump-layout",
    ),
    "a layout of another shape": (
        lambda at: _edit(at / "rank-00001.json", lambda j: j["tensors"][W].update(layout=["R"])),
        "dump-layout",
    ),
    "indices outside": (
        lambda at: _edit(
            at / "rank-00001.json",
            lambda j: j["tensors"][W].update(layout=[{"dim": 0, "indices": [3, 4]}]),
        ),
        "dump-layout",
    ),
    "a tensor more": (
        lambda at: _edit(
            at / "rank-00001.json",
            lambda j: j["tensors"].update(v={"shape": [1], "layout": None}),
        ),
        "dump-unreadable",
    ),
    "other dtype": (
        lambda at: save_file(
            {W: torch.zeros(2, dtype=torch.float64)}, str(at / "rank-00001.safetensors")
        ),
        "dump-disagrees",
    ),
    "other local shape": (
        lambda at: save_file({W: torch.zeros(3)}, str(at / "rank-00001.safetensors")),
        "dump-layout",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_dump_is_refused_by_name(tmp_path: Path, what: str) -> None:
    damage, slug = DAMAGE[what]
    damage(_two_ranks(tmp_path))
    with pytest.raises(DumpError, match=slug) as caught:
        dump.read(tmp_path)
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2
    assert str(tmp_path) in str(caught.value)


def test_a_half_written_rank_is_not_finished(tmp_path: Path, monkeypatch: Any) -> None:
    _two_ranks(tmp_path)
    monkeypatch.setattr(dump, "save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DumpError, match=r"disk full.*dump-not-written"):
        _two_ranks(tmp_path)
    with pytest.raises(DumpError, match="missing-rank"):
        dump.read(tmp_path)


def _with_parts(folder: Path, *parts: tuple[Tensor, Any]) -> dump.Dump:
    entries = {(i,): {W: Entry(local, (4,), (layout,))} for i, (local, layout) in enumerate(parts)}
    return dump.read(write(folder, entries, {"dp": len(parts)}))


def test_overlaps_that_agree_are_one_tensor_and_others_are_refused(tmp_path: Path) -> None:
    first, second = Indexed(0, (0, 1, 2)), Indexed(0, (2, 3))
    value = torch.tensor([1.0, 2.0, math.nan, 4.0])
    agree = _with_parts(tmp_path / "a", (value[:3], first), (value[2:], second))
    assert torch.equal(agree.global_tensor(W).nan_to_num(), value.nan_to_num())
    differ = _with_parts(tmp_path / "b", (value[:3], first), (torch.tensor([3.0, 4.0]), second))
    with pytest.raises(DumpError, match=r"element \[2\]. Got 3.0 on rank 1, nan .*dump-overlap"):
        differ.global_tensor(W)
    copies = _with_parts(tmp_path / "c", (value, Replicate()), (value + 1, Replicate()))
    with pytest.raises(DumpError, match="dump-overlap"):
        copies.global_tensor(W)


def test_elements_on_no_rank_are_refused(tmp_path: Path) -> None:
    holes = _with_parts(
        tmp_path, (torch.ones(1), Indexed(0, (0,))), (torch.ones(2), Indexed(0, (1, 3)))
    )
    with pytest.raises(DumpError, match=r"1 of 4 missing, the first at \[2\].*dump-hole"):
        holes.global_tensor(W)


def test_a_sum_needs_every_rank_of_its_axis(tmp_path: Path) -> None:
    half = _with_parts(tmp_path, (torch.ones(4), Partial()), (torch.ones(4), Replicate()))
    with pytest.raises(DumpError, match=r"P\(sum\) on rank 0.*dump-hole"):
        half.global_tensor(W)


@pytest.mark.parametrize(
    ("changed", "slug"),
    [
        ({"rank": 2}, "dump-mesh"),
        ({"coordinate": (0, 0)}, "dump-mesh"),
        ({"world_size": 3}, "dump-mesh"),
        ({"entries": {W: Entry(torch.ones(4), (4,), (Shard(0),))}}, "dump-layout"),
        ({"entries": {W: Entry(torch.ones(4), (4,), (Shard(1),))}}, "dump-layout"),
    ],
)
def test_what_does_not_fit_is_not_written(tmp_path: Path, changed: dict, slug: str) -> None:
    given = {"rank": 0, "world_size": 2, "axes": {"dp": 2}, "coordinate": (0,), "entries": {}}
    with pytest.raises(DumpError, match=slug):
        dump.write_rank(tmp_path / "dump", **{**given, **changed})
    assert not (tmp_path / "dump").exists()


def test_a_strided_shard_keeps_its_order(tmp_path: Path) -> None:
    layout = (Strided(0, 2), Shard(0))
    value = torch.arange(8.0)
    for rank, (at, part) in enumerate(scatter(value, layout, (2, 2)).items()):
        entry = Entry(part, (8,), layout)
        key = "free|0|gradients|w"
        dump.write_rank(
            tmp_path,
            rank=rank,
            world_size=4,
            axes={"dp": 2, "tp": 2},
            coordinate=at,
            entries={key: entry},
        )
    found = dump.read(tmp_path)

    assert found.layout(key, (1, 0)) == layout
    assert found.locals(key)[1, 0].tolist() == [2.0, 3.0]
