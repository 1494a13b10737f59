"""What a rank holds of a tensor: local values and placements on the case's mesh.

The only module of the checker that knows DTensor. Local values are read with `to_local`,
never `full_tensor`, which would reduce first and hide differences between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel


def is_wrapper(module: nn.Module) -> bool:
    """Say whether a module reduces the gradients of what it wraps: DDP or fully_shard."""
    return isinstance(module, (DistributedDataParallel, FSDPModule))


def is_distributed(value: Tensor) -> bool:
    """Say whether a tensor carries placements of its own."""
    return isinstance(value, DTensor)


def local_part(value: Tensor, mesh: Any, axes: Mapping[str, int]) -> tuple[Tensor, Any]:
    """Return `(local tensor, one placement per axis of the case's mesh)`.

    None stands for the placements of a plain tensor, and of a DTensor on a mesh whose axes
    are not the case's. Axes that a DTensor's own mesh lacks replicate it.
    """
    if not isinstance(value, DTensor):
        return value, None
    local = _waited(value.to_local())
    own = value.device_mesh
    names = own.mesh_dim_names
    if names is None or not set(names) <= set(axes):
        names = _axes_by_ranks(own, mesh, axes)
    if names is None:
        return local, None
    placements = dict(zip(names, value.placements, strict=True))
    return local, tuple(placements.get(axis, Replicate()) for axis in axes)


def _axes_by_ranks(own: Any, mesh: Any, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the case's axes that a mesh without their names runs along, by its ranks.

    Its dims are recognised by size and by the distance of neighbouring ranks.
    """
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


def _waited(local: Tensor) -> Tensor:
    """Return the tensor itself where a collective's result is still on its way."""
    wait = getattr(local, "wait", None)
    return wait() if callable(wait) else local
