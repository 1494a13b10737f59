"""Compare what one process holds of a candidate with the stored reference.

Gives additive statistics per tensor and part, small enough to send: no rank needs the whole
model, none sees another rank's tensors, and nothing here talks to one. `merge` adds them up.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
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
from spmd_verify.norms import as_real, deviation, is_rounding, row_sums
from spmd_verify.store import Entry, Store
from spmd_verify.trajectory import Observation, Observed, by_parameter, same_bits
from spmd_verify.ulp import ulp_distance
from spmd_verify.verdict import STAGES

NO_SUCH_TENSOR: Final = "the reference has no such tensor"


class Statistics(msgspec.Struct, kw_only=True):
    """What one copy of one part of one tensor says. Plain values: crosses process borders.

    Attributes:
        run: `free` or `anchored`.
        step: From 0.
        stage: See `verdict.STAGES`.
        name: First name in the reference.
        coordinates: Ranks that hold this copy, bit for bit.
        layout: In short, see `layouts.describe`.
        ranges: The part, per dim the half-open global ranges.
        numel: Elements of the part.
        is_exact: Equal to the reference bit for bit.
        squares: Sum of squared deviation from the float64 reference by local dim-0 row,
            float64 in native byte order; empty for an exact copy of a compared-by-bits value.
        power: Sum of squares of the float64 reference over the part.
        excess: `k - 1` of the factor k that fits this part best.
        unfitted: Sum of squares that this factor leaves. Sent besides `squares` because a
            residual taken from sums alone drowns in cancellation below 1e-8.
        non_finite: Elements that are NaN or inf where the reference is not.
        has_signal: Whether any element is not zero.
        worst_index: Global index of the element that deviates most, None if none does.
        actual: Its value here.
        expected: Its value in the reference.
        max_ulp: Largest distance from the reference, in ulp of the tensor's dtype.
        differing: Elements that are not equal to the reference's.
        digest: Of the bits of this copy; empty for an exact one.
        value: The number itself, for tensors of one element.
        problem: Why the tensor could not be compared, if it could not.
    """

    run: str
    step: int
    stage: str
    name: str
    coordinates: list[tuple[int, ...]]
    layout: str = ""
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    numel: int = 0
    is_exact: bool = False
    squares: bytes = b""
    power: float = 0.0
    excess: float = 0.0
    unfitted: float = 0.0
    non_finite: int = 0
    has_signal: bool = False
    worst_index: list[int] | None = None
    actual: float = 0.0
    expected: float = 0.0
    max_ulp: int = 0
    differing: int = 0
    digest: str = ""
    value: float | None = None
    problem: str | None = None


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
    found: list[Statistics] = []
    for stage in STAGES:
        for name, observed in observation.get(stage, {}).items():
            found.extend(_compare_one(scene, stage, name, observed))
    return found


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


def _compare_one(scene: _Scene, stage: str, name: str, observed: Observed) -> Iterator[Statistics]:
    """Compare one tensor: each distinct part once, equal copies counted together."""
    entry = scene.store.entry(scene.step, stage, name)
    for layout, held in _reduced(observed, scene.mesh_shape):
        groups: dict[Region, list[tuple[Coordinate, Tensor]]] = {}
        for coordinate, local in held:
            found = Statistics(
                run=scene.run,
                step=scene.step,
                stage=stage,
                name=name,
                coordinates=[coordinate],
                layout=describe(layout),
                numel=local.numel(),
            )
            if entry is None:
                found.has_signal = bool(local.any())
                found.problem = NO_SUCH_TENSOR
                if found.has_signal:
                    yield found
                continue
            part, found.problem = _part_of(scene, entry, layout, local, coordinate)
            if part is None:
                yield found
            else:
                groups.setdefault(part, []).append((coordinate, local))
        if entry is None:
            continue
        for part, copies in groups.items():
            yield from _compare_copies(scene, entry, part, copies, describe(layout))


def _compare_copies(
    scene: _Scene,
    entry: Entry,
    part: Region,
    copies: list[tuple[Coordinate, Tensor]],
    layout: str,
) -> Iterator[Statistics]:
    """Compare the copies of one part that this process holds, equal ones once."""
    store = scene.store
    expected = store.expected(entry.step, entry.stage, entry.name, part)
    exact = expected
    if is_rounding(expected):
        exact = store.exact(scene.run, entry.step, entry.stage, entry.name, part)
    distinct: list[tuple[Tensor, Statistics]] = []
    for coordinate, local in copies:
        twin = next((known for tensor, known in distinct if same_bits(tensor, local)), None)
        if twin is not None:
            twin.coordinates.append(coordinate)
            continue
        statistics = statistics_of(local, expected, exact, entry, scene.run, part)
        statistics.coordinates, statistics.layout = [coordinate], layout
        distinct.append((local, statistics))
    yield from (statistics for _, statistics in distinct)


def statistics_of(
    local: Tensor, expected: Tensor, exact: Tensor, entry: Entry, run: str, part: Region
) -> Statistics:
    """Return the statistics of one local tensor against the same part of the reference.

    Args:
        local: This rank's part.
        expected: The reference's part, in the case's dtype.
        exact: The float64 reference's part.
        entry: The tensor in the reference.
        run: `free` or `anchored`.
        part: Where the part lies in the global tensor.
    """
    found = Statistics(
        run=run,
        step=entry.step,
        stage=entry.stage,
        name=entry.name,
        coordinates=[],
        ranges=part.ranges,
        numel=local.numel(),
        is_exact=same_bits(local, expected),
        has_signal=bool(local.any()),
    )
    if local.numel() == 1 and entry.value is not None:
        found.value = float(local)
    if found.is_exact and not is_rounding(expected):
        return found
    difference = deviation(local, exact, expected)
    finite = difference.isfinite()
    if not found.is_exact:
        found.digest = digest(local)
    found.non_finite = int((~finite).sum())
    clean = difference if not found.non_finite else difference.masked_fill(~finite, 0.0)
    shaped = clean.reshape(local.shape + clean.shape[local.ndim :])
    found.squares = _packed(_row_sums(shaped.square(), local))
    _add_fit(found, clean, exact)
    if not found.is_exact and local.numel():
        _add_worst(found, local, expected, part)
    return found


def digest(value: Tensor) -> str:
    """Return a short digest of the bits of a tensor, shape and dtype included."""
    raw = as_real(value.detach()).contiguous()
    content = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    seed = f"{tuple(value.shape)}{value.dtype}".encode()
    return hashlib.blake2b(seed + content, digest_size=8).hexdigest()


def unpacked(rows: bytes) -> Tensor:
    """Return packed row sums as float64 [rows]."""
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(rows), dtype=torch.float64)


def _packed(rows: Tensor) -> bytes:
    """Return row sums as bytes in native order."""
    return rows.contiguous().numpy().tobytes()


def _row_sums(value: Tensor, local: Tensor) -> Tensor:
    """Return sums by dim-0 row of `local`, whose complex entries are [..., 2] in `value`."""
    if local.ndim == 0:
        return value.sum(dtype=torch.float64).reshape(1)
    return row_sums(value)


def _add_fit(found: Statistics, difference: Tensor, exact: Tensor) -> None:
    """Fill in the factor that fits this part best and what it leaves."""
    reference = as_real(exact).to(torch.float64).nan_to_num(posinf=0.0, neginf=0.0)
    found.power = float(reference.square().sum())
    if found.power > 0.0:
        found.excess = float((difference * reference).sum()) / found.power
    found.unfitted = float((difference - found.excess * reference).square().sum())


def _add_worst(found: Statistics, local: Tensor, expected: Tensor, part: Region) -> None:
    """Fill in the element that differs most from the reference, and the largest ulp."""
    left, right = as_real(local), as_real(expected)
    gap = (left.to(torch.float64) - right.to(torch.float64)).abs()
    gap = torch.where(left == right, 0.0, gap.nan_to_num(nan=torch.inf, posinf=torch.inf))
    flat = int(gap.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape)]
    found.differing = int((gap != 0).sum())
    found.actual = float(left[tuple(index)])
    found.expected = float(right[tuple(index)])
    found.worst_index = list(part.global_index(index[: len(part.ranges)]))
    if is_rounding(local) and left.dtype == right.dtype:
        found.max_ulp = int(ulp_distance(left, right).max())


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
) -> tuple[Region | None, str | None]:
    """Return where a local tensor lies in the global one, or why that cannot be said."""
    if layout is not None:
        if partial_axes(layout):
            return None, f"a reduction is still due: {describe(layout)}"
        part = region(entry.shape, layout, scene.mesh_shape, coordinate)
        if part.shape != tuple(local.shape):
            return None, f"shape {list(local.shape)}, expected {list(part.shape)}"
        return part, None
    fitting = fitting_parts(entry.shape, scene.mesh_shape, coordinate, local)
    if not fitting:
        return None, f"layout unknown: shape {list(local.shape)}, global {entry.shape}"

    def distance(part: Region) -> float:
        exact = scene.store.exact(scene.run, entry.step, entry.stage, entry.name, part)
        return float(deviation(local, exact).nan_to_num().square().sum())

    return (fitting[0] if len(fitting) == 1 else min(fitting, key=distance)), None


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
