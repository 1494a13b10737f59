"""A style with one fault: the same style to everything that drives and reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from spmd_verify.cases.case import LoadedCase
from spmd_verify.layouts import region
from spmd_verify.measure import Statistics
from spmd_verify.planting.faults import GRADIENT_FACTOR, Fault, Watched
from spmd_verify.planting.graph import GraphPlanting
from spmd_verify.planting.watch import Watch
from spmd_verify.seeding import seed_all
from spmd_verify.stored.store import Store
from spmd_verify.styles.base import Observation, Observed, Style, StyleContext, StyleRun

# Far from the seeds of the steps, which count up from the case's.
_OTHER_SEED = 1_000_003
_STAGES = {"stale": "parameters", "skip_buffer": "buffers"}


class PlantedStyle:
    """Stands in for `inner` in a cell of one process.

    Attributes:
        name: The inner style's.
        runners: The inner style's.
        watch: Around the steps of an eager style.
        graph: Rewrites the graph of a graph style.
    """

    def __init__(self, inner: Style, fault: Fault, store: Store) -> None:
        """Plan; nothing is planted before `build`.

        Args:
            inner: The style.
            fault: What to plant.
            store: The reference, for the state before the first step.
        """
        self.name = inner.name
        self.runners = inner.runners
        self.watch: Watch | None = None
        self.graph: GraphPlanting | None = None
        self.fault = fault
        self.store = store
        self._inner: Any = inner

    def build(self, case: LoadedCase, context: StyleContext) -> StyleRun:
        """Build the style with the fault in its graph or around its steps."""
        if hasattr(self._inner, "transformation"):
            self.graph = self.graph or GraphPlanting(self.fault, context.axes, context.parts)
            planted = replace(self._inner, transformation=self.graph)
            return PlantedRun(self, planted.build(case, context), case, context)
        run = self._inner.build(case, context)
        if self.watch is None and not context.is_lockstep:
            self.watch = Watch(self.fault, context.axes)
        return PlantedRun(self, run, case, context)

    def watched(self, statistics: Iterable[Statistics]) -> Watched:
        """Return what this process saw."""
        seen = self.graph or self.watch
        return Watched(
            fingerprint=fingerprint(statistics),
            collectives=[] if seen is None else seen.collectives,
            has_changed=self.watch is not None and self.watch.has_changed,
            is_graph=self.graph is not None,
        )


class PlantedRun:
    """Delegates to a run; changes what its step does, reads or shows."""

    def __init__(
        self, style: PlantedStyle, inner: StyleRun, case: LoadedCase, context: StyleContext
    ) -> None:
        """Stand in for `inner`."""
        self._style = style
        self._inner = inner
        self._case = case
        self._context = context
        self._fault = style.fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, index: int, batch: Any) -> Observation:
        """Run one step with the fault."""
        fault, watch = self._fault, self._style.watch
        old = self._held() if fault.kind in _STAGES else None
        if fault.kind == "reseed" and self._is_here(fault.rank):
            seed_all(self._case.seed + _OTHER_SEED + index)
        with watch or nullcontext():
            seen = self._inner.step(index, batch)
        if watch is not None:
            watch.end_step()
        if old is not None:
            self._put_back(old, index)
        return self._scaled(seen) if fault.kind == GRADIENT_FACTOR else seen

    def state(self) -> Observation:
        """Return the live tensors."""
        return self._inner.state()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers."""
        return self._inner.optimizers()

    def evaluate(self, batch: Any) -> Mapping[str, Observed] | None:
        """Run one eval forward, without the fault."""
        return self._inner.evaluate(batch)

    def locate(self, batch: Any) -> tuple[str, str | None] | None:
        """Return what differs in the next step."""
        return self._inner.locate(batch)

    def facts(self) -> Mapping[str, Any]:
        """Return what the cell reports."""
        return self._inner.facts()

    def _is_here(self, rank: int) -> bool:
        """Say whether this process has a rank; in lockstep one generator serves all."""
        return self._context.is_lockstep or torch.distributed.get_rank() == rank

    def _held(self) -> list[Tensor]:
        """Return copies of the tensor's local parts."""
        seen = self._inner.state().get(_STAGES[self._fault.kind], {}).get(self._fault.tensor)
        return [] if seen is None else [local.detach().clone() for local in seen.local]

    def _put_back(self, old: list[Tensor], index: int) -> None:
        """Give the tensor its old value, a buffer on one rank only."""
        stage, name = _STAGES[self._fault.kind], self._fault.tensor
        seen = self._inner.state().get(stage, {}).get(name)
        if seen is None:
            return
        shape = tuple(self._context.axes.values())
        entry = self._style.store.entry(0, "initial_state", name)
        for i, (local, coordinate) in enumerate(zip(seen.local, seen.coordinates, strict=True)):
            if stage == "buffers" and not self._is_rank(coordinate):
                continue
            before = old[i] if i < len(old) else None
            if index == 0 and entry is not None and seen.layout is not None:
                part = region(entry.shape, seen.layout, shape, coordinate)
                before = self._style.store.expected(0, "initial_state", name, part)
            if before is not None and before.shape == local.shape:
                local.detach().copy_(before)

    def _is_rank(self, coordinate: tuple[int, ...]) -> bool:
        """Say whether a coordinate is the fault's rank."""
        rank = 0
        for index, size in zip(coordinate, self._context.axes.values(), strict=True):
            rank = rank * size + index
        return rank == self._fault.rank

    def _scaled(self, seen: Observation) -> Observation:
        """Return what was seen with gradients multiplied, in float64 and rounded once."""
        gradients = dict(seen.get("gradients", {}))
        for name, factor in self._fault.factors.items():
            if name in gradients:
                local = [_times(part, factor) for part in gradients[name].local]
                gradients[name] = replace(gradients[name], local=local)
        return {**seen, "gradients": gradients}


def _times(value: Tensor, factor: float) -> Tensor:
    """Return a tensor times a number near 1."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    return (value.detach().to(wide) * factor).to(value.dtype)


def fingerprint(statistics: Iterable[Statistics]) -> str:
    """Return a digest of every number that was compared, in order."""
    found = blake2b(digest_size=16)
    for entry in statistics:
        place = (entry.run, entry.step, entry.stage, entry.name, entry.coordinates, entry.ranges)
        said = (entry.is_exact, entry.digest, entry.problem, entry.actual)
        found.update(repr((place, said)).encode())
    return found.hexdigest()
