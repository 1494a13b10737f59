"""The JSON beside a rank's tensors: placements, keys and one rank's index (docs/design.md 3.6)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from spmd_verify.errors import InternalError, UsageError
from spmd_verify.layouts import (
    Indexed,
    Partial,
    Replicate,
    Shard,
    Strided,
    coordinates,
    describe,
    is_partial,
    is_sharded,
    placements_of,
    reduce_op,
    region,
)
from spmd_verify.verdict import STAGES

# 1: first version.
SCHEMA: Final = 1
OPERATIONS: Final = ("sum", "avg", "max", "min")

Layout = tuple[Any, ...]


class DumpError(UsageError):
    """A dump on disk is missing, damaged or says two things, exit 2."""


class Key(NamedTuple):
    """What a tensor of a dump is: `run|step|stage|name`."""

    run: str
    step: int
    stage: str
    name: str

    def __str__(self) -> str:
        return f"{self.run}|{self.step}|{self.stage}|{self.name}"

    @classmethod
    def of(cls, text: str) -> Key:
        """Read a key; a plain name, as in anyone's file of weights, is a parameter of step 0."""
        run, *rest = text.split("|", 3)
        if len(rest) == 3 and rest[0].isdecimal() and rest[1] in STAGES:
            return cls(run, int(rest[0]), rest[1], rest[2])
        return cls("free", 0, "parameters", text)


@dataclass
class TensorIndex:
    """What a rank's JSON says of one tensor.

    Attributes:
        shape: Global sizes, or None where unknown.
        layout: One placement per mesh axis, or None where none was declared.
        is_complex: Stored as [..., 2] real.
    """

    shape: tuple[int, ...] | None
    layout: Layout | None
    is_complex: bool = False


@dataclass
class RankIndex:
    """One rank's JSON.

    Attributes:
        path: Where it was read, for messages.
        rank: Which.
        world_size: Of how many.
        axes: Mesh axes in mesh order, `{name: ranks}`.
        coordinate: Its position on the mesh.
        tensors: By key, in the order written.
    """

    path: Path
    rank: int
    world_size: int
    axes: dict[str, int]
    coordinate: tuple[int, ...]
    tensors: dict[str, TensorIndex] = field(default_factory=dict)


def encode_index(index: RankIndex) -> bytes:
    """Return one rank's JSON."""
    tensors: dict[str, Any] = {}
    for key, entry in index.tensors.items():
        layout = None if entry.layout is None else [_plain(each) for each in entry.layout]
        shape = None if entry.shape is None else list(entry.shape)
        tensors[key] = {"shape": shape, "layout": layout}
        if entry.is_complex:
            tensors[key]["complex"] = True
    plain = {
        "schema": SCHEMA,
        "rank": index.rank,
        "world_size": index.world_size,
        "axes": index.axes,
        "coordinate": list(index.coordinate),
        "tensors": tensors,
    }
    return json.dumps(plain).encode() + b"\n"


def decode_index(path: Path) -> RankIndex:
    """Read one rank's JSON.

    Raises:
        DumpError: `dump-unreadable`, `dump-too-new`, `dump-layout`.
    """
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(path, f"no JSON: {error}") from error
    if not isinstance(plain, dict) or not _is_count(plain.get("schema")):
        raise unreadable(path, "no number under 'schema'")
    if plain["schema"] > SCHEMA:
        raise DumpError(
            f"The dump is too new: {path}. Got schema {plain['schema']}, this version reads up to "
            f"{SCHEMA}. Install the spmd-verify that wrote it, or a newer one",
            slug="dump-too-new",
        )
    wanted = {"rank": int, "world_size": int, "axes": dict, "coordinate": list, "tensors": dict}
    for key, kind in wanted.items():
        if not isinstance(plain.get(key), kind):
            raise unreadable(path, f"{plain.get(key)!r} under {key!r}, no {kind.__name__}")
    axes, coordinate = plain["axes"], plain["coordinate"]
    if not all(map(_is_count, (*axes.values(), *coordinate))) or len(axes) != len(coordinate):
        raise unreadable(path, f"coordinate {coordinate!r} on axes {axes!r}")
    index = RankIndex(path, plain["rank"], plain["world_size"], axes, tuple(coordinate))
    for key, entry in plain["tensors"].items():
        index.tensors[key] = _tensor_index(path, key, entry, len(axes))
    return index


def read_layout(plain: Any, num_axes: int, where: str) -> Layout | None:
    """Return the placements that JSON lists, or None for null.

    Args:
        plain: One placement per axis, each as in docs/design.md 3.6.
        num_axes: How many axes the mesh has.
        where: For messages.

    Raises:
        DumpError: `dump-layout`.
    """
    if plain is None:
        return None
    if not isinstance(plain, list) or len(plain) != num_axes:
        raise layout_error(where, repr(plain), f"a list of {num_axes}, one placement per axis")
    return tuple(_placement(each, where) for each in plain)


def layout_error(where: str, got: str, expected: str) -> DumpError:
    """Return the error for a layout that cannot be read or does not fit."""
    return DumpError(
        f'A layout does not fit: {where}. Got {got}, expected {expected}. Write "R", '
        f'{{"shard": dim}}, {{"indices": [..], "dim": dim}} or {{"partial": "sum"}} for each axis',
        slug="dump-layout",
    )


def unreadable(path: Path, why: str) -> DumpError:
    """Return the error for a file that cannot be read."""
    return DumpError(
        f"Cannot read the dump: {path}. Got {why}. It is damaged, or was not written by "
        f"spmd_verify.record or in the form of docs/compare.md: write it again",
        slug="dump-unreadable",
    )


def check_mesh(index: RankIndex) -> None:
    """Refuse a rank or coordinate that is not on its mesh."""
    axes, coordinate = index.axes, index.coordinate
    fits = len(axes) == len(coordinate) and all(
        0 <= at < size for at, size in zip(coordinate, axes.values(), strict=True)
    )
    if not (fits and math.prod(axes.values()) == index.world_size > index.rank >= 0):
        raise DumpError(
            f"A rank is not on its mesh: {index.path}. Got rank {index.rank} of "
            f"{index.world_size} at {list(coordinate)} on axes {axes}. The product of the axes is "
            f"the number of ranks, and a coordinate has one index per axis",
            slug="dump-mesh",
        )


def check_ranks(path: Path, indices: Sequence[RankIndex]) -> None:
    """Refuse a dump that lacks ranks or has those of another run."""
    first = indices[0]
    for index in indices:
        if (index.axes, index.world_size) != (first.axes, first.world_size):
            raise DumpError(
                f"Ranks disagree: mesh of {index.path}. Got {index.axes}, {first.axes} on rank "
                f"{first.rank}. Files of two runs are mixed: write the dump into an empty folder",
                slug="dump-disagrees",
            )
    there = {index.rank for index in indices}
    missing = sorted(set(range(first.world_size)) - there)
    if missing:
        raise DumpError(
            f"Ranks are missing: {path}. Got {len(there)} of {first.world_size} ranks, without "
            f"{missing[:10]}. A rank without its JSON did not finish: wait for it, or run again",
            slug="dump-missing-rank",
        )
    if {index.coordinate for index in indices} != set(coordinates(tuple(first.axes.values()))):
        raise DumpError(
            f"Ranks share a coordinate: {path}. Got "
            f"{[list(index.coordinate) for index in indices]}. Every rank has its own",
            slug="dump-mesh",
        )


def check_part(index: RankIndex, key: str, local: tuple[int, ...]) -> None:
    """Refuse a part whose shape is not what its layout makes of the global one."""
    entry = index.tensors[key]
    if entry.layout is None or entry.shape is None:
        return
    where = f"tensor {key!r} of rank {index.rank} in {index.path}"
    try:
        mesh_shape = tuple(index.axes.values())
        part = region(entry.shape, entry.layout, mesh_shape, index.coordinate)
    except InternalError as error:
        raise layout_error(where, f"{describe(entry.layout)}: {error.message}", "one that fits")
    if part.shape != local:
        raise layout_error(
            where,
            f"shape {list(local)}",
            f"{list(part.shape)}: {describe(entry.layout)} of {list(entry.shape)}",
        )


def own_placements(layout: Any, ndim: int) -> Layout | None:
    """Return a layout in the checker's own placements, which compare by value.

    Args:
        layout: See `layouts`.
        ndim: Of the tensor; dims counted from the end become dims from the start.
    """
    if layout is None:
        return None
    return tuple(_own(placement, ndim) for placement in placements_of(layout))


def _own(placement: Any, ndim: int) -> Any:
    """Return one placement as the checker's own."""
    if is_partial(placement):
        return Partial(reduce_op(placement))
    if not is_sharded(placement):
        return Replicate()
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if hasattr(placement, "indices"):
        return Indexed(dim, tuple(placement.indices))
    if hasattr(placement, "split_factor"):
        return Strided(dim, int(placement.split_factor))
    units = tuple(getattr(placement, "units", ()))
    outer, inner = getattr(placement, "outer", 1), getattr(placement, "inner", 1)
    return Shard(dim, units, outer, inner)


def _plain(placement: Any) -> Any:
    """Return one of the checker's placements as JSON."""
    if isinstance(placement, Partial):
        return {"partial": placement.op}
    if isinstance(placement, Indexed):
        return {"indices": list(placement.indices), "dim": placement.dim}
    if isinstance(placement, Strided):
        return {"shard": placement.dim, "strided": placement.split_factor}
    if isinstance(placement, Shard):
        if not placement.units and placement.outer == placement.inner == 1:
            return {"shard": placement.dim}
        return {
            "shard": placement.dim,
            "units": list(placement.units),
            "outer": placement.outer,
            "inner": placement.inner,
        }
    return "R"


def _placement(plain: Any, where: str) -> Any:
    """Return what JSON says of one axis."""
    if plain == "R":
        return Replicate()
    if isinstance(plain, Mapping):
        dim: Any = plain.get("shard")
        indices: Any = plain.get("indices")
        units = plain.get("units", [])
        outer, inner = plain.get("outer", 1), plain.get("inner", 1)
        if plain.get("partial") in OPERATIONS:
            return Partial(plain["partial"])
        if _are_counts(indices) and _is_count(plain.get("dim")):
            return Indexed(plain["dim"], tuple(indices))
        if _is_count(dim) and _is_count(plain.get("strided")):
            return Strided(dim, plain["strided"])
        if _is_count(dim) and _are_counts(units) and _are_counts([outer, inner]):
            return Shard(dim, tuple(units), outer, inner)
    raise layout_error(where, repr(plain), "a placement")


def _tensor_index(path: Path, key: str, plain: Any, num_axes: int) -> TensorIndex:
    """Read what JSON says of one tensor."""
    if not isinstance(plain, dict):
        raise unreadable(path, f"{plain!r} for tensor {key!r}")
    shape = plain.get("shape")
    if shape is not None and not _are_counts(shape):
        raise unreadable(path, f"shape {shape!r} of tensor {key!r}")
    layout = read_layout(plain.get("layout"), num_axes, f"tensor {key!r} in {path}")
    sizes = None if shape is None else tuple(shape)
    return TensorIndex(sizes, layout, bool(plain.get("complex", False)))


def _is_count(value: Any) -> bool:
    """Say whether JSON holds a number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(value: Any) -> bool:
    """Say whether JSON holds a list of numbers from 0."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_count, value))
