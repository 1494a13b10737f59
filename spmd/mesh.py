"""The mesh a graph is partitioned for: axis names and sizes, and who talks to whom."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from spmd.errors import InternalError, UsageError


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes; ranks are numbered in row-major order.

    Attributes:
        names: One per axis.
        sizes: Ranks along each axis, each >= 1.
        parts: Names and sizes of the axes that a single axis was made of, outer first.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    parts: tuple[tuple[str, int], ...] = ()

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

    def groups_of(self, name: str) -> list[list[int]]:
        """Return the groups of an axis, or of a part of the only one, by its name."""
        if name in self.names:
            return self.groups(self.names.index(name))
        names, sizes = zip(*self.parts, strict=True)
        return MeshShape(names, sizes).groups(names.index(name))

    def span(self, axis: int, block: int) -> tuple[str, int]:
        """Return name and size of the groups of `block` consecutive ranks of an axis.

        Raises:
            InternalError: There are no such groups.
        """
        if block in (0, self.sizes[axis]):
            return self.names[axis], self.sizes[axis]
        if not self.parts or self.parts[-1][1] != block:
            raise InternalError(f"no groups of {block} ranks on {self}; please report it")
        return self.parts[-1]


@dataclass(frozen=True)
class JoinedMesh:
    """A mesh of several axes used as one, whose parts are still there.

    Attributes:
        parts: `DeviceMesh`, `{axis: size}` or `MeshShape` of the axes, outer first.
    """

    parts: Any


def mesh_shape(mesh: Any) -> MeshShape:
    """Return the shape of a `DeviceMesh`, a `{name: size}`, a MeshShape or a JoinedMesh."""
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, JoinedMesh):
        parts = mesh_shape(mesh.parts)
        joined = tuple(zip(parts.names, parts.sizes, strict=True))
        return MeshShape(("_".join(parts.names),), (parts.num_ranks,), joined)
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
