"""Compare what one process holds of a candidate with the stored reference.

Gives additive statistics per tensor and part, small enough to send: no rank needs the whole
model, none sees another rank's tensors, and nothing here talks to one. `merge` adds them up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from spmd_verify.layouts import (
    Coordinate,
    Region,
    combine,
    coordinates,
    describe,
    partial_axes,
    placements_of,
    reduce_op,
    region,
)
from spmd_verify.measure import Statistics, Task, measure
from spmd_verify.norms import deviation, is_rounding
from spmd_verify.reference.trajectory import Observation, Observed, by_parameter, same_bits
from spmd_verify.stored.store import Entry, Store
from spmd_verify.verdict import STAGES

NO_SUCH_TENSOR: Final = "the reference has no such tensor"


def compare(
    store: Store, observation: Observation, *, run: str, step: int, mesh_shape: Sequence[int]
) -> list[Statistics]:
    """Compare what this process holds of one step with the reference.

    Args:
        store: The reference.
        observation: `{stage: {name: Observed}}`; local tensors.
        run: `free` or `anchored`.
        step: From 0.
        mesh_shape: Ranks along each mesh axis.

    Returns:
        One entry per distinct copy of a part; tensors that the reference does not have are
        reported only where they carry signal.
    """
    scene = _Scene(store, run, step, tuple(mesh_shape))
    pending = [
        each
        for stage in STAGES
        for name, observed in observation.get(stage, {}).items()
        for each in _compare_one(scene, stage, name, observed)
    ]
    measure([each.task for each in pending if each.task is not None])
    return [each.statistics() for each in pending]


def hyper_parameter_differences(
    store: Store,
    values: dict[str, float],
    *,
    run: str,
    step: int,
    coordinate: Coordinate,
    groups: Sequence[Sequence[str]] | None = None,
) -> list[Statistics]:
    """Return one entry per hyper-parameter that differs from the reference before a step.

    Args:
        store: The reference.
        values: What `trajectory.hyper_parameters` gave.
        run: `free`.
        step: From 0.
        coordinate: This rank's.
        groups: Names of the parameters in each group, where the style may group otherwise
            than one device; then every parameter has its own values.
    """
    expected = store.index.hyper_parameters[step]
    differing = {
        name: (values.get(name, math.nan), expected.get(name, math.nan))
        for name in dict.fromkeys([*expected, *values])
        if values.get(name) != expected.get(name)
    }
    if groups and store.index.groups:
        differing = _by_parameter(values, groups, expected, store.index.groups)
    return [
        Statistics(
            run=run,
            step=step,
            stage="inputs",
            name=name,
            coordinates=[coordinate],
            layout="R",
            worst_index=[],
            actual=actual,
            expected=due,
            problem=f"hyper-parameter {name} is {actual!r}, expected {due!r}",
        )
        for name, (actual, due) in differing.items()
    ]


def _by_parameter(
    values: dict[str, float],
    groups: Sequence[Sequence[str]],
    expected: dict[str, float],
    expected_groups: Sequence[Sequence[str]],
) -> dict[str, tuple[float, float]]:
    """Return what differs by key: `lr`, or `weight_decay of norm.weight` where only some do."""
    own, due = by_parameter(values, groups), by_parameter(expected, expected_groups)
    # A parameter that this rank does not have cannot differ here.
    everyone = {name for _, name in own}
    found: dict[tuple[str, float, float], list[str]] = {}
    for (key, name), value in own.items():
        if (key, name) in due and due[key, name] != value:
            found.setdefault((key, value, due[key, name]), []).append(name)
    return {
        key if set(names) == everyone else f"{key} of {', '.join(names)}": (actual, right)
        for (key, actual, right), names in found.items()
    }


@dataclass(frozen=True)
class _Scene:
    """What all tensors of one step are compared against."""

    store: Store
    run: str
    step: int
    mesh_shape: tuple[int, ...]


@dataclass
class _Pending:
    """One entry of the answer: ready, or to be measured."""

    ready: Statistics | None = None
    task: Task | None = None
    coordinates: list[Coordinate] = field(default_factory=list)
    layout: str = ""

    def statistics(self) -> Statistics:
        """Return the entry; all tasks have been measured."""
        if self.ready is not None:
            return self.ready
        assert self.task is not None, "one of the two is there"
        assert self.task.found is not None, "tasks are measured first"
        self.task.found.coordinates, self.task.found.layout = self.coordinates, self.layout
        return self.task.found


def _compare_one(scene: _Scene, stage: str, name: str, observed: Observed) -> Iterator[_Pending]:
    """Compare one tensor: each distinct part once, equal copies counted together."""
    entry = scene.store.entry(scene.step, stage, name)
    for layout, held in _reduced(observed, scene.mesh_shape):
        groups: dict[Region, list[tuple[Coordinate, Tensor]]] = {}
        described = describe(layout)
        for coordinate, local in held:
            part, problem = None, NO_SUCH_TENSOR
            if entry is not None:
                part, problem = _part_of(scene, entry, layout, local, coordinate)
            if part is not None:
                groups.setdefault(part, []).append((coordinate, local))
                continue
            has_signal = entry is None and bool(local.any())
            if entry is None and not has_signal:
                continue
            found = Statistics(
                run=scene.run,
                step=scene.step,
                stage=stage,
                name=name,
                coordinates=[coordinate],
                layout=described,
                numel=local.numel(),
                has_signal=has_signal,
                problem=problem,
            )
            yield _Pending(found)
        if entry is not None:
            for part, copies in groups.items():
                yield from _compare_copies(scene, entry, part, copies, described)


def _compare_copies(
    scene: _Scene,
    entry: Entry,
    part: Region,
    copies: list[tuple[Coordinate, Tensor]],
    layout: str,
) -> Iterator[_Pending]:
    """Compare the copies of one part that this process holds, equal ones once."""
    store = scene.store
    expected = store.expected(entry.step, entry.stage, entry.name, part)
    exact = expected
    if is_rounding(expected):
        exact = store.exact(scene.run, entry.step, entry.stage, entry.name, part)
    distinct: list[tuple[Tensor, _Pending]] = []
    for coordinate, local in copies:
        twin = next((known for tensor, known in distinct if same_bits(tensor, local)), None)
        if twin is not None:
            twin.coordinates.append(coordinate)
            continue
        task = Task(local, expected, exact, entry, scene.run, part)
        distinct.append((local, _Pending(None, task, [coordinate], layout)))
    yield from (pending for _, pending in distinct)


def _reduced(
    observed: Observed, mesh_shape: Sequence[int]
) -> Iterator[tuple[Any, list[tuple[Coordinate, Tensor]]]]:
    """Give `(layout, [(coordinate, local)])`, pending reductions done where all parts are here.

    A partial value is the sum (or other operation) over the ranks of an axis; a process that
    holds only some of them cannot tell, and its parts stay partial.
    """
    held = list(zip(observed.coordinates, observed.local, strict=True))
    layout = observed.layout
    if layout is None or not partial_axes(layout):
        yield layout, held
        return
    everything = dict(held)
    if len(everything) < len(list(coordinates(mesh_shape))):
        yield layout, held
        return
    placements = list(placements_of(layout))
    for axis in partial_axes(layout):
        operation = reduce_op(placements[axis])
        combined: dict[Coordinate, Tensor] = {}
        for coordinate in everything:
            line = [
                everything[(*coordinate[:axis], i, *coordinate[axis + 1 :])]
                for i in range(mesh_shape[axis])
            ]
            combined[coordinate] = combine(line, operation)
        everything, placements[axis] = combined, _WHOLE
    yield tuple(placements), list(everything.items())


class _Whole:
    """Stands for an axis whose reduction has been done: every rank has the whole."""


_WHOLE: Final = _Whole()


def _part_of(
    scene: _Scene, entry: Entry, layout: Any, local: Tensor, coordinate: Coordinate
) -> tuple[Region | None, str]:
    """Return where a local tensor lies in the global one, or why that cannot be said."""
    if layout is not None:
        if partial_axes(layout):
            return None, f"a reduction is still due: {describe(layout)}"
        part = region(entry.shape, layout, scene.mesh_shape, coordinate)
        if part.shape != tuple(local.shape):
            return None, f"shape {list(local.shape)}, expected {list(part.shape)}"
        return part, ""
    fitting = fitting_parts(entry.shape, scene.mesh_shape, coordinate, local)
    if not fitting:
        return None, f"layout unknown: shape {list(local.shape)}, global {entry.shape}"

    def distance(part: Region) -> float:
        exact = scene.store.exact(scene.run, entry.step, entry.stage, entry.name, part)
        return float(deviation(local, exact).nan_to_num().square().sum())

    return (fitting[0] if len(fitting) == 1 else min(fitting, key=distance)), ""


def fitting_parts(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Coordinate, local: Tensor
) -> list[Region]:
    """Return what an undeclared tensor may be by its shape: whole, or chunks over some axes."""
    parts = dict.fromkeys(
        region(shape, layout, mesh_shape, coordinate) for layout in layouts(shape, mesh_shape)
    )
    return [part for part in parts if part.shape == tuple(local.shape)]


def layouts(shape: Sequence[int], mesh_shape: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Give what an undeclared tensor may be: per axis whole or a chunk of a dim, whole first."""
    choices = [_WHOLE, *(_Chunk(dim) for dim in range(len(shape)))]
    return itertools.product(*(choices if size > 1 else [_WHOLE] for size in mesh_shape))


class _Chunk:
    """A torch.chunk split of one dim."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
