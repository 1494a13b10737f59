"""The mesh a graph is partitioned for: axis names and sizes, and who talks to whom."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch


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

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
