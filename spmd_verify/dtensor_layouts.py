"""What a rank holds of a tensor: local values, and placements on the mesh of all ranks.

The only module of the checker that knows DTensor and torch's wrappers. Local values are read
with `to_local`, never `full_tensor`, which would reduce first and hide differences between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmd_verify.dumps.format import OPERATIONS
from spmd_verify.layouts import (
    Indexed,
    Replicate,
    is_partial,
    is_sharded,
    reduce_op,
    region,
)

Layout = tuple[Any, ...]


def is_wrapper(module: nn.Module) -> bool:
    """Say whether a module reduces the gradients of what it wraps: DDP or fully_shard."""
    from torch.distributed.fsdp import FSDPModule  # a recorded script may do without
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(module, (DistributedDataParallel, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free the parameters that fully_shard has gathered; other models are left alone."""
    from torch.distributed.fsdp import FSDPModule  # as above

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_distributed(value: Any) -> bool:
    """Say whether a tensor carries placements of its own."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def local_of(value: Any) -> Tensor:
    """Return the local tensor of a DTensor, once it is there; a plain tensor as it is."""
    local: Any = value.to_local() if is_distributed(value) else value
    wait = getattr(local, "wait", None)  # a collective that still runs
    return wait() if callable(wait) else local


def local_part(value: Any, mesh: Any, axes: Mapping[str, int]) -> tuple[Tensor, Layout | None]:
    """Return `(local tensor, one placement per axis of the mesh of all ranks)`.

    None stands for the placements of a plain tensor, and of a DTensor on a mesh whose axes
    are not those. Axes that a DTensor's own mesh lacks replicate it.
    """
    local = local_of(value)
    if not is_distributed(value):
        return local, None
    names = _axes_of(value.device_mesh, mesh, axes)
    return local, None if names is None else _by_axis(names, value.placements, axes)


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
    placements = tuple(value.placements)
    names = None if mesh is None else _axes_of(own, mesh, axes)
    if names is not None:
        is_ordered = [name for name in axes if name in names] == list(names)
        if is_ordered and not any(hasattr(each, "split_factor") for each in placements):
            return _by_axis(names, placements, axes)
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


def _by_axis(names: Sequence[str], placements: Iterable[Any], axes: Mapping[str, int]) -> Layout:
    """Return one placement per axis; an axis without one replicates."""
    by_name = dict(zip(names, placements, strict=True))
    return tuple(by_name.get(axis, Replicate()) for axis in axes)


def _axes_of(own: Any, mesh: Any, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the axes that the dims of a mesh run along, None where they are none of `axes`.

    Without their names its dims are recognised by size and by the distance of neighbouring
    ranks.
    """
    names = own.mesh_dim_names
    if names and set(names) <= set(axes):
        return tuple(names)
    if own == mesh:
        return tuple(axes)
    strides = dict(zip(axes, mesh.mesh.stride(), strict=True))
    found = []
    for dim in range(own.mesh.ndim):
        line = own.mesh.movedim(dim, 0).reshape(own.mesh.shape[dim], -1)[:, 0].tolist()
        distance = line[1] - line[0] if len(line) > 1 else 0
        fitting = [axis for axis in axes if axes[axis] == len(line) and strides[axis] == distance]
        if len(fitting) != 1:
            return None
        found.append(fitting[0])
    return tuple(found) if len(set(found)) == len(found) else None


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
