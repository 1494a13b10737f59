"""Dumps: what ranks hold, on disk, by anyone (docs/design.md 3.6).

A folder has `rank-00000.safetensors` and `rank-00000.json` per rank; a single `.safetensors`
file is a dump of one rank whose tensors are whole. Files are written under another name and
renamed, the JSON last: a rank without one is not finished. No pickle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmd_verify.dumps.format import (
    DumpError,
    Layout,
    RankIndex,
    TensorIndex,
    check_mesh,
    check_part,
    check_ranks,
    decode_index,
    encode_index,
    own_placements,
    unreadable,
)
from spmd_verify.layouts import (
    Coordinate,
    Region,
    combine,
    describe,
    partial_axes,
    put_region,
    reduce_op,
    region,
    take_region,
)
from spmd_verify.norms import as_real
from spmd_verify.reference.trajectory import same_bits


@dataclass(frozen=True)
class Entry:
    """One tensor that a rank writes.

    Attributes:
        local: This rank's part.
        shape: Global sizes, or None where unknown.
        layout: One placement per mesh axis (see `layouts`), or None where none is declared.
    """

    local: Tensor
    shape: Sequence[int] | None = None
    layout: Any = None


def write_rank(
    folder: str | Path,
    *,
    rank: int,
    world_size: int,
    axes: Mapping[str, int],
    coordinate: Sequence[int],
    entries: Mapping[str, Entry],
) -> None:
    """Write what one rank holds; the tensors keep their dtype.

    Args:
        folder: Made if it does not exist; an earlier dump of this rank there is replaced.
        rank: From 0.
        world_size: Number of ranks that write.
        axes: Mesh axes in mesh order, `{name: ranks}`; their product is the world size.
        coordinate: This rank's position on the mesh.
        entries: By key, `run|step|stage|name`, in the reference's order where there is one.

    Raises:
        DumpError: `dump-layout` where a tensor is not the part that its layout says;
            `dump-mesh` where rank or coordinate is not on the mesh; `dump-not-written`.
    """
    folder = Path(folder)
    data, path = folder / _file(rank, "safetensors"), folder / _file(rank, "json")
    index = RankIndex(path, rank, world_size, dict(axes), tuple(coordinate))
    check_mesh(index)
    for key, entry in entries.items():
        shape = None if entry.shape is None else tuple(entry.shape)
        layout = own_placements(entry.layout, entry.local.ndim)
        index.tensors[key] = TensorIndex(shape, layout, entry.local.is_complex())
        check_part(index, key, tuple(entry.local.shape))
    tensors = _storable({key: entry.local for key, entry in entries.items()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        save_file(tensors, f"{data}.part")
        os.replace(f"{data}.part", data)
        Path(f"{path}.part").write_bytes(encode_index(index))
        os.replace(f"{path}.part", path)
    except (OSError, SafetensorError, KeyError) as error:
        raise DumpError(
            f"Cannot write the dump: rank {rank} to {folder}. Got {error!r}. Name a folder that "
            f"can be written, and tensors of a dtype that safetensors has",
            slug="dump-not-written",
        ) from error


def read(path: str | Path) -> Dump:
    """Open a dump and check that all of it is there and agrees; tensors are mapped, not read.

    Args:
        path: Folder, or a single `.safetensors` file.

    Raises:
        DumpError: `dump-missing`, `dump-missing-rank`, `dump-unreadable`, `dump-too-new`,
            `dump-mesh`, `dump-layout`, `dump-disagrees`.
    """
    path = Path(path)
    if path.is_file():
        file = open_tensors(path)
        index = RankIndex(path, 0, 1, {}, ())
        index.tensors = {key: TensorIndex(None, ()) for key in list(file.keys())}
        return Dump(path, [index], [file])
    found = sorted(path.glob("rank-*.json"))
    if not found:
        raise DumpError(
            f"There is no dump: {path}. Got {_what_is_at(path)}, expected a .safetensors file or "
            f"a folder with rank-00000.json. A rank without its JSON did not finish; plain files "
            f"per rank need --layout",
            slug="dump-missing",
        )
    indices = [decode_index(each) for each in found]
    for index in indices:
        check_mesh(index)
    check_ranks(path, indices)
    files = [open_tensors(index.path.with_suffix(".safetensors")) for index in indices]
    return Dump(path, indices, files)


class Dump:
    """A dump that was read.

    Attributes:
        path: Where.
        axes: Mesh axes in mesh order, `{name: ranks}`; empty for a single file.
        mesh_shape: Their sizes.
        ranks: By coordinate.
    """

    def __init__(self, path: Path, indices: Sequence[RankIndex], files: Sequence[Any]) -> None:
        """Check that every tensor is in its file and that ranks agree; see `read`."""
        self.path = path
        self.axes = dict(indices[0].axes)
        self.mesh_shape = tuple(self.axes.values())
        self.ranks = {index.coordinate: index.rank for index in indices}
        self._indices = {index.coordinate: index for index in indices}
        self._files = {index.coordinate: file for index, file in zip(indices, files, strict=True)}
        self._shapes: dict[str, tuple[int, ...] | None] = {}
        self._dtypes: dict[str, str] = {}
        for index in indices:
            self._take_in(index)

    def __iter__(self) -> Iterator[str]:
        """Give the keys; see `keys`."""
        return iter(self._shapes)

    def __contains__(self, key: str) -> bool:
        """Say whether any rank has a tensor."""
        return key in self._shapes

    def keys(self) -> list[str]:
        """Return the keys of all ranks in the order written, rank 0's first."""
        return list(self._shapes)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the global sizes of a tensor; None where no rank says and they do not follow."""
        return self._shapes[key]

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor as stored, in safetensors' words, such as `F32`."""
        return self._dtypes[key]

    def layout(self, key: str, coordinate: Coordinate) -> Layout | None:
        """Return the layout that a rank declares for its part; None where it declares none."""
        return self._indices[coordinate].tensors[key].layout

    def locals(self, key: str) -> dict[Coordinate, Tensor]:
        """Return the parts of all ranks that have the tensor, in rank order."""
        return {
            coordinate: self._local(key, coordinate)
            for coordinate, index in self._indices.items()
            if key in index.tensors
        }

    def local_shape(self, key: str, coordinate: Coordinate) -> tuple[int, ...]:
        """Return the shape of one rank's part without reading it."""
        sizes = tuple(self._files[coordinate].get_slice(key).get_shape())
        return sizes[:-1] if self._indices[coordinate].tensors[key].is_complex else sizes

    def local_shapes(self, key: str) -> dict[Coordinate, tuple[int, ...]]:
        """Return the shapes of the parts of all ranks that have the tensor, in rank order."""
        return {
            coordinate: self.local_shape(key, coordinate)
            for coordinate, index in self._indices.items()
            if key in index.tensors
        }

    def declare(self, key: str, shape: Sequence[int], layouts: Mapping[Coordinate, Any]) -> None:
        """Say what a tensor without layout is.

        Args:
            key: Which.
            shape: Global sizes.
            layouts: Per coordinate that has the tensor.

        Raises:
            DumpError: `dump-layout` where a part is not what its layout says.
        """
        for coordinate, layout in layouts.items():
            index = self._indices[coordinate]
            index.tensors[key].shape = tuple(shape)
            index.tensors[key].layout = own_placements(layout, len(shape))
            check_part(index, key, self.local_shape(key, coordinate))
        self._shapes[key] = tuple(shape)

    def parts(self, key: str) -> dict[Region, dict[Coordinate, Tensor]]:
        """Return the parts of a tensor by what they are of it, pending reductions done.

        Raises:
            DumpError: `dump-no-layout`; `dump-hole` where a reduction lacks a rank.
        """
        shape = self.shape(key)
        held = self.locals(key)
        layouts = {coordinate: self.layout(key, coordinate) for coordinate in held}
        if shape is None or None in layouts.values():
            raise DumpError(
                f"A tensor has no layout: {key!r} in {self.path}. Got global shape "
                f"{None if shape is None else list(shape)} and parts of {_shapes_text(held)}. "
                f"Declare it with --layout, or write the dump with one",
                slug="dump-no-layout",
            )
        found: dict[Region, dict[Coordinate, Tensor]] = {}
        for coordinate, local in self._reduced(key, held).items():
            part = region(shape, layouts[coordinate], self.mesh_shape, coordinate)
            found.setdefault(part, {})[coordinate] = local
        return found

    def global_tensor(self, key: str) -> Tensor:
        """Return a tensor put together from the parts of all ranks.

        Raises:
            DumpError: `dump-overlap` where two ranks have other content for one element,
                `dump-hole` where no rank has one, `dump-no-layout`.
        """
        parts = self.parts(key)
        shape = self.shape(key)
        assert shape is not None
        first = next(iter(next(iter(parts.values())).values()))
        value = torch.zeros(shape, dtype=first.dtype)
        seen = torch.zeros(shape, dtype=torch.bool)
        for part, copies in parts.items():
            for coordinate, local in copies.items():
                if part.is_whole(shape) and not bool(seen.any()):
                    value, seen = local, torch.ones(shape, dtype=torch.bool)
                    continue
                known = take_region(seen, part)
                there = torch.where(known, take_region(value, part), local)
                if not same_bits(there, local):
                    raise self._overlap(key, coordinate, part, there, local)
                put_region(value, part, local)
                put_region(seen, part, torch.ones_like(local, dtype=torch.bool))
        missing = int((~seen).sum())
        if missing:
            index = (~seen).nonzero()[0].tolist()
            raise DumpError(
                f"Elements are on no rank: {key!r} in {self.path}. Got {missing} of "
                f"{value.numel()} missing, the first at {index}. Check the layouts, or that every "
                f"rank wrote its part",
                slug="dump-hole",
            )
        return value

    def missing(self, key: str) -> int:
        """Count the elements of a tensor that no rank has; 0 where it has no layout."""
        shape, layouts = (
            self.shape(key),
            {at: self.layout(key, at) for at in self.local_shapes(key)},
        )
        if shape is None or None in layouts.values():
            return 0
        found = {region(shape, each, self.mesh_shape, at) for at, each in layouts.items()}
        if any(part.is_whole(shape) for part in found):
            return 0
        seen = torch.zeros(shape, dtype=torch.bool)
        for part in found:
            put_region(seen, part, torch.ones(part.shape, dtype=torch.bool))
        return int((~seen).sum())

    def _take_in(self, index: RankIndex) -> None:
        """Check one rank's index against its file and the other ranks."""
        file = self._files[index.coordinate]
        stored = set(file.keys())
        if stored != set(index.tensors):
            odd = sorted(stored ^ set(index.tensors))[0]
            side = "only in the .safetensors file" if odd in stored else "only in the JSON"
            raise unreadable(index.path, f"tensor {odd!r} {side}")
        for key, entry in index.tensors.items():
            local = self.local_shape(key, index.coordinate)
            dtype = str(file.get_slice(key).get_dtype())
            if entry.shape is None and (entry.layout is not None and not _splits(entry.layout)):
                entry.shape = local
            self._agree(index, key, "dtype", self._dtypes.setdefault(key, dtype), dtype)
            known = self._shapes.setdefault(key, entry.shape)
            if None not in (known, entry.shape):
                self._agree(index, key, "global shape", known, entry.shape)
            self._shapes[key] = known or entry.shape
            check_part(index, key, local)

    def _agree(self, index: RankIndex, key: str, what: str, known: Any, own: Any) -> None:
        """Refuse what two ranks say differently."""
        if known != own:
            raise DumpError(
                f"Ranks disagree: {what} of {key!r} in {self.path}. Got {own!r} on rank "
                f"{index.rank}, {known!r} on a rank before it. Write the dump again from one run",
                slug="dump-disagrees",
            )

    def _local(self, key: str, coordinate: Coordinate) -> Tensor:
        """Read one rank's part."""
        value: Tensor = self._files[coordinate].get_tensor(key)
        is_complex = self._indices[coordinate].tensors[key].is_complex
        return torch.view_as_complex(value) if is_complex else value

    def _reduced(self, key: str, held: dict[Coordinate, Tensor]) -> dict[Coordinate, Tensor]:
        """Do the reductions that are due over mesh axes, as every rank's layout says."""
        layouts = {coordinate: self.layout(key, coordinate) for coordinate in held}
        due = {axis for layout in layouts.values() for axis in partial_axes(layout)}
        for axis in sorted(due):
            combined: dict[Coordinate, Tensor] = {}
            for coordinate in held:
                line = [
                    (*coordinate[:axis], i, *coordinate[axis + 1 :])
                    for i in range(self.mesh_shape[axis])
                ]
                alike = all(layouts.get(each) == layouts[coordinate] for each in line)
                if not alike or len({held[each].shape for each in line}) > 1:
                    raise DumpError(
                        f"A reduction lacks ranks: {key!r} in {self.path} is "
                        f"{describe(layouts[coordinate])} on rank {self.ranks[coordinate]}, but "
                        f"not on every rank of its axis. Write it on all of them",
                        slug="dump-hole",
                    )
                operation = reduce_op((layouts[coordinate] or ())[axis])
                combined[coordinate] = combine([held[each] for each in line], operation)
            held = combined
        return held

    def _overlap(
        self, key: str, coordinate: Coordinate, part: Region, there: Tensor, local: Tensor
    ) -> DumpError:
        """Return the error for an element of which two ranks have other content."""
        differs = (there != local) & ~(there.isnan() & local.isnan())
        own = tuple(differs.nonzero()[0].tolist())
        return DumpError(
            f"Ranks have other content for one element: {key!r} in {self.path}, element "
            f"{list(part.global_index(own))}. Got {local[own].item()!r} on rank "
            f"{self.ranks[coordinate]}, {there[own].item()!r} on a rank before it. Copies must be "
            f"equal bit for bit: check the layouts, or compare this dump as the candidate",
            slug="dump-overlap",
        )


def _splits(layout: Layout) -> bool:
    """Say whether an axis splits a dim, so that a part's shape is not the global one."""
    return any(hasattr(placement, "dim") for placement in layout)


def open_tensors(path: Path) -> Any:
    """Map a safetensors file.

    Raises:
        DumpError: `dump-unreadable`.
    """
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise unreadable(path, str(error) or type(error).__name__) from error


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors takes them: real, dense, none sharing memory."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in tensors.items():
        real = as_real(value.detach()).cpu().contiguous()
        if real.untyped_storage().data_ptr() in seen or real.untyped_storage().nbytes() > (
            real.numel() * real.element_size()
        ):
            real = real.clone()
        seen.add(real.untyped_storage().data_ptr())
        found[key] = real
    return found


def _shapes_text(held: Mapping[Coordinate, Tensor]) -> str:
    """Return the shapes of parts in short."""
    shapes = dict.fromkeys(str(list(local.shape)) for local in held.values())
    return ", ".join(shapes)


def _what_is_at(path: Path) -> str:
    """Say what a path without a dump is."""
    if not path.exists():
        return "nothing"
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    return f"{', '.join(names[:5])}" if names else "an empty folder"


def _file(rank: int, ending: str) -> str:
    """Return the name of one of a rank's files."""
    return f"rank-{rank:05d}.{ending}"
