"""What the ranks' arguments are together: parts of a global batch, or the same everywhere.

Runs where a step may be captured; calls that reuse a graph pass no shapes around.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spmd.errors import UsageError
from spmd.layout import Layout, Placement, Replicate, Shard, chunk_units
from spmd.lifting import World
from spmd.mesh import MeshShape
from spmd.mode import ParallelMode
from spmd.program import Signature
from spmd.ranks import ProcessRanks, checksum

Splits = dict[str, tuple[int | None, ...]]


def local_parts(world: World, ranks: ProcessRanks, mode: ParallelMode) -> dict[int, Layout]:
    """Return {position: layout} of the arguments the ranks hold in parts.

    Args:
        world: This rank's values.
        ranks: The mesh.
        mode: Says which dim of an argument is split over which axis.

    Raises:
        UsageError: `ranks-differ`; `batch-parts`, if parts are not those of torch.chunk;
            `input-batch-dim`, if an argument that is not split differs between ranks.
    """
    everyone = _described(world, ranks)
    names = list(everyone[0])
    stacked = {name: tuple(zip(*(row[name][0] for row in everyone), strict=True)) for name in names}
    signature = Signature(world.specs)
    shapes: list[Any] = [
        stacked.get(s.name, ()) if s.kind == "argument" else () for s in world.specs
    ]
    splits = mode.argument_splits(signature, shapes, len(ranks.mesh.sizes))
    found: dict[int, Layout] = {}
    for position, spec in signature.of_kind("argument"):
        dims = splits[spec.name]
        layout = _layout(spec.name, stacked[spec.name], dims, ranks.mesh)
        _refuse_other_values(spec.name, everyone, dims, ranks.mesh)
        if not layout.is_replicated:
            found[position] = layout
    return found


def refuse_different(world: World, ranks: ProcessRanks) -> None:
    """Raise unless every rank passes the same global batch.

    Raises:
        UsageError: `ranks-differ`; `batch-differs`, naming the argument.
    """
    everyone = _described(world, ranks)
    for name, mine in everyone[0].items():
        for rank, row in enumerate(everyone):
            if row[name] != mine:
                what = f"shapes {list(mine[0])} and {list(row[name][0])}"
                what = what if row[name][0] != mine[0] else f"other values of shape {list(mine[0])}"
                raise UsageError(
                    f"Input {name!r} differs between the ranks, which all pass the global batch "
                    f"under batch='global': ranks 0 and {rank} passed {what}. Pass the same batch "
                    "everywhere, or each rank's own part with batch='local'.",
                    "batch-differs",
                )


def _described(world: World, ranks: ProcessRanks) -> list[dict[str, tuple[tuple[int, ...], int]]]:
    """Return every rank's {argument: (shape, checksum)}; refuse other names or dtypes."""
    arguments = [
        (spec.name, value)
        for spec, value in zip(world.specs, world.values, strict=True)
        if spec.kind == "argument" and isinstance(value, Tensor)
    ]
    mine = {name: (tuple(v.shape), checksum(v)) for name, v in arguments}
    described: list[Any] = [(f"input {n!r}", f"{v.dim()} dims", v.dtype) for n, v in arguments]
    plain = [s for s in world.static if isinstance(s, tuple) and len(s) == 3 and s[1] in _PLAIN]
    described += [(f"argument {s[0]}", repr(s[2])) for s in plain]
    ranks.same_everywhere(described)
    return ranks.everyone(mine)


_PLAIN = ("int", "float", "str", "bytes", "bool", "NoneType")


def _layout(name: str, sizes: Any, dims: tuple[int | None, ...], mesh: MeshShape) -> Layout:
    """Return the layout of the ranks' parts of one argument.

    Args:
        name: The argument.
        sizes: Per dim, its local size on every rank.
        dims: Per mesh axis, the dim it splits.
        mesh: Axis names and sizes.
    """
    for index, row in enumerate(sizes):
        if index not in dims and len(set(row)) > 1:
            raise UsageError(
                f"Dim {index} of input {name!r} has the sizes {list(row)} on the ranks, and only a "
                f"batch dim may differ (split here: {_split_text(dims)}). Pad the parts to one "
                "size, set input_batch_dim, or pass batch='global'.",
                "batch-parts",
            )
    placements: list[Placement] = []
    for axis, dim in enumerate(dims):
        if dim is None:
            placements.append(Replicate())
            continue
        along: list[set[int]] = [set() for _ in range(mesh.sizes[axis])]
        for rank, coordinate in enumerate(mesh.coordinates()):
            along[coordinate[axis]].add(sizes[dim][rank])
        units = tuple(max(found) for found in along)
        expected = chunk_units(sum(units), len(units))
        if units != expected or any(len(found) > 1 for found in along):
            raise UsageError(
                f"Parts of input {name!r} along dim {dim}: the ranks passed {list(sizes[dim])}, "
                f"torch.chunk of {sum(units)} over axis {mesh.names[axis]!r} gives "
                f"{list(expected)}. Split the global batch with torch.chunk, or pass "
                "batch='global'.",
                "batch-parts",
            )
        placements.append(Shard(dim, units))
    return Layout(tuple(placements))


def _refuse_other_values(
    name: str, everyone: Any, dims: tuple[int | None, ...], mesh: MeshShape
) -> None:
    """Raise if ranks that should hold the same part of an argument passed other values."""
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, coordinate in enumerate(mesh.coordinates()):
        part = tuple(c for c, dim in zip(coordinate, dims, strict=True) if dim is not None)
        other, value = first.setdefault(part, (rank, everyone[rank][name][1]))
        if everyone[rank][name][1] != value:
            shape = list(everyone[rank][name][0])
            raise UsageError(
                f"Input {name!r} of shape {shape} is split along {_split_text(dims)}, so ranks "
                f"{other} and {rank} must pass the same values, and they do not. If it has a batch "
                "dim, name it: input_batch_dim={argument: dim or None}; else pass the same tensor "
                "on every rank.",
                "input-batch-dim",
            )


def _split_text(dims: tuple[int | None, ...]) -> str:
    named = sorted({dim for dim in dims if dim is not None})
    return f"dim {', '.join(map(str, named))}" if named else "no dim"
