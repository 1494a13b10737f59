"""What a DTensor says of itself, in the checker's placements on the mesh of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmd_verify.dump_format import OPERATIONS
from spmd_verify.layouts import (
    Indexed,
    Replicate,
    is_partial,
    is_sharded,
    reduce_op,
    region,
)

Layout = tuple[Any, ...]


def root_mesh(model: nn.Module) -> Any:
    """Return the mesh of a model's first DTensor, or the one that it was sliced from."""
    for value in (*model.parameters(), *model.buffers()):
        mesh = getattr(value, "device_mesh", None)
        if mesh is not None:
            # Source: torch 2.13 distributed/device_mesh.py; older and newer ones may lack it.
            whole = getattr(mesh, "_get_root_mesh", None)
            return whole() if whole is not None else mesh
    return None


def layout_of(
    value: Any, local_shape: tuple[int, ...], axes: Mapping[str, int], mesh: Any
) -> Layout | None:
    """Return the layout of a DTensor, one placement per axis of the mesh of all ranks.

    Axes that the tensor's own mesh lacks replicate it. What placements of consecutive parts
    cannot say (torch's strided shards, a mesh that is no slice of the whole one) becomes the
    indices this rank has.

    Args:
        value: A DTensor.
        local_shape: Of its local tensor.
        axes: Of the mesh of all ranks.
        mesh: That mesh, or None where there is none.

    Returns:
        None where no layout gives the local shape, or the indices of more than one dim would
        be needed on one axis.
    """
    own, shape = value.device_mesh, tuple(value.shape)
    names = own.mesh_dim_names
    placements = tuple(value.placements)
    if mesh is not None and (own == mesh or (names and set(names) <= set(axes))):
        by_name = dict(zip(names or axes, placements, strict=True))
        is_ordered = [name for name in axes if name in by_name] == list(by_name)
        if is_ordered and not any(hasattr(each, "split_factor") for each in placements):
            return tuple(by_name.get(name, Replicate()) for name in axes)
    coordinate = own.get_coordinate()
    if coordinate is None or not all(map(_is_plain, placements)):
        return None
    return _by_indices(shape, local_shape, axes, _indices(shape, placements, own, coordinate))


def is_odd_partial(value: Any) -> bool:
    """Say whether a DTensor waits for a reduction that is none of sum, avg, max and min."""
    return any(
        is_partial(each) and (type(each).__name__ != "Partial" or reduce_op(each) not in OPERATIONS)
        for each in getattr(value, "placements", ())
    )


def _is_plain(placement: Any) -> bool:
    """Say whether a placement is a shard or a copy."""
    return is_sharded(placement) or type(placement).__name__ == "Replicate"


def _indices(
    shape: tuple[int, ...], placements: Layout, mesh: Any, coordinate: Any
) -> dict[int, tuple[int, ...]]:
    """Return the global indices that this rank has of every dim that is split.

    Source of the strided rule: torch 2.13 `_StridedShard`: the dim in `split_factor` chunks,
    each of them split over the axis.
    """
    found = {dim: torch.arange(size) for dim, size in enumerate(shape)}
    split: dict[int, None] = {}
    for axis, placement in enumerate(placements):
        if not is_sharded(placement):
            continue
        dim, ranks = placement.dim % max(len(shape), 1), mesh.size(axis)
        blocks = found[dim].chunk(int(getattr(placement, "split_factor", 1)))
        pieces = [block.chunk(ranks)[coordinate[axis] : coordinate[axis] + 1] for block in blocks]
        found[dim] = torch.cat([piece for each in pieces for piece in each] or [found[dim][:0]])
        split[dim] = None
    return {dim: tuple(found[dim].tolist()) for dim in split}


def _by_indices(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    axes: Mapping[str, int],
    indices: Mapping[int, tuple[int, ...]],
) -> Layout | None:
    """Return a layout that gives this rank these indices; see `layout_of`."""
    if len(indices) > len(axes):
        return None
    layout = [Indexed(dim, own) for dim, own in indices.items()]
    whole = [Replicate()] * (len(axes) - len(layout))
    mesh_shape = tuple(axes.values())
    part = region(shape, (*layout, *whole), mesh_shape, (0,) * len(axes))
    return (*layout, *whole) if part.shape == local_shape else None
