"""Which mesh axis a process group runs over, and other groups to send something in instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from spmd_verify.planting.faults import HALF
from spmd_verify.styles.base import mesh_coordinates


class MeshGroups:
    """The groups of this rank on the cell's mesh."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        """Find this rank's line of ranks along every axis."""
        every = mesh_coordinates(axes)
        self._own = every[dist.get_rank()]
        self._lines = {
            name: tuple(r for r, c in enumerate(every) if self._is_on_line(c, axis))
            for axis, name in enumerate(axes)
        }
        self._whole = ",".join(axes)

    def axis_of(self, ranks: tuple[int, ...]) -> str:
        """Return the axis these ranks are a line of, `dp,tp` for all ranks, else the ranks."""
        for name, line in self._lines.items():
            if line == ranks and (len(ranks) > 1 or len(self._lines) == 1):
                return name
        if len(ranks) == dist.get_world_size():
            return self._whole
        return f"ranks {','.join(map(str, ranks))}"

    def alone(self) -> Any:
        """Make a group of this rank only: what is reduced there stays as it is."""
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def other(self, name: str) -> Any:
        """Make this rank's group along an axis, or of its half of the ranks."""
        ranks = self._lines.get(name)
        if name == HALF:
            size = dist.get_world_size() // 2
            start = dist.get_rank() // size * size
            ranks = tuple(range(start, start + size))
        assert ranks is not None, "the plan names axes of the mesh"
        return dist.new_group(list(ranks), use_local_synchronization=True)

    def _is_on_line(self, coordinate: tuple[int, ...], axis: int) -> bool:
        """Say whether a coordinate differs from this rank's on one axis only."""
        others = [i for i in range(len(coordinate)) if i != axis]
        return all(coordinate[i] == self._own[i] for i in others)
