"""Layouts that a dump does not have: from `--layout`, or inferred from shapes where only one fits.

Also opens folders of plain `rank0.safetensors` files, which say nothing but their numbers.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from spmd_verify.dumps import dump
from spmd_verify.dumps.dump import Dump, open_tensors
from spmd_verify.dumps.format import DumpError, Key, Layout, RankIndex, TensorIndex, read_layout
from spmd_verify.errors import InternalError, UsageError
from spmd_verify.layouts import (
    Coordinate,
    Replicate,
    Shard,
    coordinates,
    describe,
    is_sharded,
    region,
)

Shape = tuple[int, ...]


def read_any(path: str | Path, axes: Mapping[str, int] | None = None) -> Dump:
    """Open a dump, or a folder of plain safetensors files, one per rank.

    Args:
        path: Folder or `.safetensors` file.
        axes: Of the mesh, for plain files; their order is by number, the last axis fastest.

    Raises:
        DumpError: `dump-axes` where plain files and axes do not agree; see `dump.read`.
    """
    path = Path(path)
    found = sorted(path.glob("*.safetensors"), key=_number) if path.is_dir() else []
    if not found or any(path.glob("rank-*.json")):
        return dump.read(path)
    names = ", ".join(each.name for each in found[:5])
    numbers = [_number(each) for each in found]
    if any("-of-" in each.stem for each in found) or numbers != list(range(len(found))):
        raise DumpError(
            f"These are not files of ranks: {path}. Got {names}, expected one per rank, numbered "
            f"from 0, such as rank0.safetensors. Pieces of one rank's weights must be joined first",
            slug="dump-axes",
        )
    if axes is None or math.prod(axes.values()) != len(found):
        raise DumpError(
            f"The mesh of these files is not known: {path}. Got {len(found)} files, "
            f"{'no --axes' if axes is None else f'axes {dict(axes)}'}. Give --axes with as many "
            f"ranks, such as --axes dp={len(found)}",
            slug="dump-axes",
        )
    indices = []
    files = [open_tensors(each) for each in found]
    places = coordinates(tuple(axes.values()))
    for rank, (file, coordinate) in enumerate(zip(files, places, strict=True)):
        index = RankIndex(found[rank], rank, len(found), dict(axes), coordinate)
        index.tensors = {key: TensorIndex(None, None) for key in list(file.keys())}
        indices.append(index)
    return Dump(path, indices, files)


def read_layout_file(path: str | Path) -> dict[str, Any]:
    """Return `{name glob: placements}` of a `--layout` file.

    Raises:
        UsageError: `layout-file`.
    """
    try:
        plain = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        plain = error
    if not isinstance(plain, dict):
        raise UsageError(
            f"Cannot read the layouts: {path}. Got {plain!r}, expected a JSON object of name "
            f'globs, such as {{"*.weight": [{{"shard": 0}}], "*": ["R"]}}',
            slug="layout-file",
        )
    return plain


def declare_layouts(held: Dump, shapes: Mapping[str, Shape], given: Mapping[str, Any]) -> list[str]:
    """Declare the layout of every tensor that has none, as far as one is known.

    A given one that matches the name counts first, else the one that gives all ranks the shapes
    they have. Where none does, and for per-rank losses, the tensor is left without.

    Args:
        held: The dump.
        shapes: Global sizes by key (`run|step|stage|name`), of the reference.
        given: `{name glob: placements}`; the first glob that matches counts.

    Returns:
        Notes: what was inferred, by layout.

    Raises:
        DumpError: `dump-layout`, `layout-ambiguous`.
    """
    inferred: dict[str, list[str]] = {}
    for text in held.keys():  # noqa: SIM118 - a dump is no mapping
        own = held.local_shapes(text)
        if None not in (held.layout(text, at) for at in own):
            continue
        key = Key.of(text)
        shape = shapes.get(str(key))
        pattern = next((glob for glob in given if fnmatchcase(key.name, glob)), None)
        if pattern is not None:
            where = f"{pattern!r} in --layout, for {text!r} in {held.path}"
            layout = read_layout(given[pattern], len(held.axes), where) or ()
            sizes = global_shape(own, layout) if shape is None else shape
            held.declare(text, sizes, dict.fromkeys(own, layout))
        elif key.stage != "loss" and not any(own.values()):  # a number has nothing to split
            held.declare(text, (), dict.fromkeys(own, (Replicate(),) * len(held.axes)))
        elif key.stage != "loss" and shape is not None:
            found = fitting(own, shape, held.mesh_shape)
            if len(found) > 1:
                raise _ambiguous(held, text, shape, own, found)
            if found:
                held.declare(text, shape, dict.fromkeys(own, found[0]))
                inferred.setdefault(describe(found[0]), []).append(key.name)
    return [
        f"layout {layout} inferred from shapes: {_some(list(dict.fromkeys(names)))}"
        for layout, names in inferred.items()
    ]


def fitting(own: Mapping[Coordinate, Shape], shape: Shape, mesh_shape: Shape) -> list[Layout]:
    """Return the layouts that give every rank the local shape it has, those that agree once."""
    if any(len(local) != len(shape) for local in own.values()):
        return []
    found: dict[tuple[Any, ...], Layout] = {}
    for layout in _proposed(own, shape, mesh_shape):
        try:
            parts = {at: region(shape, layout, mesh_shape, at) for at in own}
        except InternalError:
            continue
        if all(parts[at].shape == local for at, local in own.items()):
            found.setdefault(tuple(parts.values()), layout)
    return list(found.values())


def global_shape(own: Mapping[Coordinate, Shape], layout: Layout) -> Shape:
    """Return the global sizes that local ones add up to under a layout."""
    first = next(iter(own.values()))
    sizes = []
    for dim in range(len(first)):
        axes = {
            axis
            for axis, each in enumerate(layout)
            if is_sharded(each) and each.dim % len(first) == dim
        }
        origin = next(iter(own))
        line = [
            local[dim]
            for at, local in own.items()
            if all(at[axis] == origin[axis] for axis in range(len(at)) if axis not in axes)
        ]
        sizes.append(sum(line))
    return tuple(sizes)


def _proposed(
    own: Mapping[Coordinate, Shape], shape: Shape, mesh_shape: Shape
) -> Iterator[tuple[Any, ...]]:
    """Give every layout of whole and torch.chunk parts, then uneven parts over one axis."""
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    yield from itertools.product(choices, repeat=len(mesh_shape))
    origin = next(iter(own))
    for axis, dim in itertools.product(range(len(mesh_shape)), range(len(shape))):
        line = [(*origin[:axis], i, *origin[axis + 1 :]) for i in range(mesh_shape[axis])]
        units = tuple(own[at][dim] for at in line if at in own)
        if sum(units) == shape[dim] and len(units) == mesh_shape[axis]:
            whole: list[Any] = [Replicate()] * len(mesh_shape)
            whole[axis] = Shard(dim, units)
            yield tuple(whole)


def _ambiguous(
    held: Dump, text: str, shape: Shape, own: Mapping[Coordinate, Shape], found: Sequence[Layout]
) -> DumpError:
    """Return the error for a tensor that several layouts fit."""
    local = ", ".join(dict.fromkeys(str(list(each)) for each in own.values()))
    names = " or ".join(describe(layout) for layout in found)
    return DumpError(
        f"Several layouts fit a tensor: {text!r} in {held.path}. Got parts {local} of "
        f"{list(shape)} on mesh {dict(held.axes)}: {names}. Say which with --layout",
        slug="layout-ambiguous",
    )


def _number(path: Path) -> int:
    """Return the last number in a file's name; -1 for none."""
    found = re.findall(r"\d+", path.stem)
    return int(found[-1]) if found else -1


def _some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
