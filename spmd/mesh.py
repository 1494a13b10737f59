"""The mesh a graph is partitioned for: axis names and sizes, and who talks to whom."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from spmd.errors import UsageError


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes; ranks are numbered in row-major order.

    Attributes:
        names: One per axis.
        sizes: Ranks along each axis, each >= 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the mesh."""
        return math.prod(self.sizes)

    def coordinates(self) -> list[tuple[int, ...]]:
        """Return the coordinate of every rank, in rank order."""
        return list(itertools.product(*(range(n) for n in self.sizes)))

    def groups(self, axis: int) -> list[list[int]]:
        """Return the ranks that differ only along `axis`, one list per group."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates()):
            groups.setdefault(coordinate[:axis] + coordinate[axis + 1 :], []).append(rank)
        return list(groups.values())


def mesh_shape(mesh: Any) -> MeshShape:
    """Return the shape of a `DeviceMesh`, a `{name: size}` or a MeshShape."""
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, dict):
        return MeshShape(tuple(mesh), tuple(mesh.values()))
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return MeshShape(tuple(names), tuple(mesh.shape))


def default_mesh() -> Any:
    """Return a one-axis DeviceMesh `dp` over all ranks, on the accelerator if there is one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(_default_device(), (dist.get_world_size(),), mesh_dim_names=("dp",))


def one_axis(mesh: Any) -> Any:
    """Return `mesh` seen as one axis over all its ranks, in row-major order; None stays None."""
    if mesh is None or len(mesh_shape(mesh).sizes) == 1:
        return mesh
    shape = mesh_shape(mesh)
    name = "_".join(shape.names)
    if isinstance(mesh, dict | MeshShape):
        return MeshShape((name,), (shape.num_ranks,))
    if mesh.mesh_dim_names:
        return mesh._flatten(name)
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=(name,))


def device_mesh_of(mesh: Any) -> Any:
    """Return the DeviceMesh a mode's `mesh` stands for in this process.

    Args:
        mesh: `DeviceMesh`, `{axis: size}`, `MeshShape`, or None for one axis over all ranks.

    Raises:
        UsageError: `no-process-group`; `mesh-size`, if a shape has another number of ranks
            than the process group.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if mesh is not None and not isinstance(mesh, dict | MeshShape):
        return mesh
    if not dist.is_initialized():
        raise UsageError(
            "A compiled step runs on the ranks of a process group, and there is none in this "
            "process. Start it with torchrun and call torch.distributed.init_process_group, or "
            "use spmd.lockstep.compile, which needs no processes.",
            "no-process-group",
        )
    if mesh is None:
        return default_mesh()
    shape, world_size = mesh_shape(mesh), dist.get_world_size()
    if shape.num_ranks != world_size:
        raise UsageError(
            f"The mesh {dict(zip(shape.names, shape.sizes, strict=True))} has {shape.num_ranks} "
            f"ranks, the process group has {world_size}. Use a mesh of {world_size} ranks, or "
            "pass a DeviceMesh over some of them.",
            "mesh-size",
        )
    return init_device_mesh(_default_device(), shape.sizes, mesh_dim_names=shape.names)


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
