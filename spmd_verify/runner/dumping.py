"""Take copies of what a driven style shows and write them as a dump (docs/design.md 3.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spmd_verify.dumps.dump import Entry, write_rank
from spmd_verify.layouts import partial_axes, region
from spmd_verify.stored.store import Store
from spmd_verify.styles.base import Observation, StyleContext, mesh_coordinates


@dataclass
class DumpTaker:
    """Collects the observations of one process; in lockstep those of all ranks.

    Attributes:
        store: The reference, for global shapes.
        mesh_shape: Ranks along each axis.
    """

    store: Store
    mesh_shape: tuple[int, ...]
    _held: dict[tuple[int, ...], dict[str, Entry]] = field(default_factory=dict)

    def take(self, run: str, step: int, observation: Observation) -> None:
        """Copy everything of one observation; a second tensor of a name is `name@1`."""
        for stage, tensors in observation.items():
            for name, seen in tensors.items():
                known = self.store.entry(step, stage, name)
                shape = None if known is None else tuple(known.shape)
                layout = None if shape is None else seen.layout
                for local, coordinate in zip(seen.local, seen.coordinates, strict=True):
                    held = self._held.setdefault(coordinate, {})
                    key = unique(f"{run}|{step}|{stage}|{name}", held)
                    fits = layout is not None
                    if shape is not None and fits and not partial_axes(layout):
                        part = region(shape, layout, self.mesh_shape, coordinate)
                        fits = part.shape == tuple(local.shape)
                    held[key] = Entry(local.detach().clone(), shape, layout if fits else None)

    def write(self, folder: str, context: StyleContext) -> None:
        """Write one file per rank that this process holds."""
        for rank, coordinate in enumerate(mesh_coordinates(context.axes)):
            if coordinate in context.coordinates:
                write_rank(
                    folder,
                    rank=rank,
                    world_size=math.prod(context.axes.values()),
                    axes=context.axes,
                    coordinate=coordinate,
                    entries=self._held.get(coordinate, {}),
                )


def unique(key: str, taken: dict[str, Entry]) -> str:
    """Return a key, or the key with `@1`, `@2`, ... where it is taken."""
    if key not in taken:
        return key
    at = 1
    while f"{key}@{at}" in taken:
        at += 1
    return f"{key}@{at}"
