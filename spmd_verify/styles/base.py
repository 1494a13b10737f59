"""What a style is: how one way of running a training step in parallel is driven and read.

A style builds a `StyleRun` on every rank (or once, for all ranks, in lockstep). The runner
calls `step` once per training step, reads `state` between steps, and may copy other values
into the tensors that `state` returned. The judge sees `Observed` values only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from spmd_verify.cases.case import LoadedCase
from spmd_verify.reference.trajectory import Observation, Observed
from spmd_verify.stopwatch import Stopwatch

__all__ = ["Observation", "Observed", "Style", "StyleContext", "StyleRun"]


@dataclass(frozen=True)
class StyleContext:
    """Where a style is built.

    Attributes:
        axes: Mesh axes in mesh order, `{name: ranks}`.
        coordinates: Coordinates of the ranks whose tensors are in this process: one under
            `processes`, all of the mesh under `lockstep`.
        device: Where the tensors are.
        is_lockstep: Whether this process holds every rank.
        shared: Kept between the cells of one case in this process, for what styles can
            use again, such as a captured step; keys begin with the style's module.
        parts: The axes that `axes` joins to one, `{name: ranks}`, outer first; empty where the
            style sees the mesh as it was asked for.
        cell: Kept between the builds of one cell in this process; see `kept`.
        stopwatch: Where the cell's time goes; a style that captures a step says so here.
    """

    axes: Mapping[str, int]
    coordinates: tuple[tuple[int, ...], ...]
    device: torch.device
    is_lockstep: bool
    shared: MutableMapping[str, Any] = field(default_factory=dict)
    cell: MutableMapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def kept(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what was made under `key` for this cell, making it the first time."""
        if key not in self.cell:
            self.cell[key] = make()
        return self.cell[key]

    def any_rank(self, flag: bool) -> bool:
        """Say whether something is so on any rank. Collective; what ranks do next depends on it."""
        import torch.distributed as dist

        if self.is_lockstep or not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        said = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said)

    def device_mesh(self) -> Any:
        """Return the torch DeviceMesh of the running process group."""
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(self.axes)
        return init_device_mesh(self.device.type, tuple(self.axes.values()), mesh_dim_names=names)


class StyleRun(Protocol):
    """One built model under one style, stepped from 0 on."""

    def step(self, index: int, batch: Any) -> Observation:
        """Run one training step on the global batch; the caller has set the seeds.

        Returns:
            What happened inside: `inputs`, `module_outputs`, `loss`, `gradients`, `clipping`.
        """
        ...

    def state(self) -> Observation:
        """Return `parameters`, `buffers`, `optimizer_state`; the tensors are the live ones."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers; their groups hold the live hyper-parameters."""
        ...

    def parameter_groups(self) -> list[list[str]] | None:
        """Return the parameters of every group; None where they are grouped as on one device."""
        ...

    def evaluate(self, batch: Any) -> Mapping[str, Observed] | None:
        """Run one eval forward on the global batch; None where the style has none."""
        ...

    def release(self) -> None:
        """Let go of gathered copies of parameters: their parts are about to be written.

        An eval forward without backward may leave some, which the next forward would use.
        """
        ...

    def locate(self, batch: Any) -> tuple[str, str | None] | None:
        """Return operator and source line of what the next step would compute differently.

        Changes nothing. None where nothing differs, or the style has no such correspondence.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return what the cell reports of the style: `fallbacks`, `collectives`, `captures`."""
        ...


class Style(Protocol):
    """One way of running a case in parallel.

    Attributes:
        name: Its id in `spmd-verify styles`.
        runners: The runners that can run it.

    A style that never divides by a number of ranks may say so with `may_divide = False`; exact
    mode takes any mesh then.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    @property
    def runners(self) -> frozenset[str]: ...  # noqa: D102 - above

    def build(self, case: LoadedCase, context: StyleContext) -> StyleRun:
        """Build model, optimizer and parallel step on this rank, or on all in lockstep.

        Raises:
            Unsupported: The style does not take the case; one line says why.
        """
        ...


def mesh_coordinates(axes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the coordinate of every rank, in rank order: the last axis runs fastest."""
    return list(itertools.product(*(range(size) for size in axes.values())))
