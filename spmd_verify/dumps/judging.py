"""Judge one dump by another: the reference's floors, the candidate's statistics, one cell."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.compare import compare
from spmd_verify.dumps.dump import Dump
from spmd_verify.dumps.format import DumpError, Key
from spmd_verify.dumps.inference import declare_layouts
from spmd_verify.dumps.noiseless import FEWEST_RUNS, Noiseless
from spmd_verify.errors import UsageError
from spmd_verify.judge import Judgement, judge
from spmd_verify.layouts import Coordinate, describe
from spmd_verify.measure import Statistics
from spmd_verify.noise.floor_table import FloorTable
from spmd_verify.noise.floors import Ensemble
from spmd_verify.noise.runs import BY_ELEMENT, Noise
from spmd_verify.norms import is_rounding
from spmd_verify.record import Cell, Row
from spmd_verify.reference.single import Reference
from spmd_verify.reference.trajectory import Observed, StepRecord, Trajectory
from spmd_verify.stored.store import Entry, Store, write_store
from spmd_verify.verdict import STAGES, Verdict, unit_roundoff

RUN: Final = "free"
# Where a reference that is not finite says nothing; a mask may well be infinite.
_FINITE_STAGES: Final = ("loss", "gradients", "clipping", "optimizer_state", "parameters")


@dataclass
class Comparison:
    """What is compared with what.

    Attributes:
        reference: The dump that is right.
        candidate: The dump that is judged.
        exact: The reference in float64, if there is one.
        noise: More runs of the reference, such as other orders of the batch.
        layouts: `{name glob: placements}` of tensors that have none.
        notes: What the report says besides; filled in here.
    """

    reference: Dump
    candidate: Dump
    exact: Dump | None = None
    noise: Sequence[Dump] = ()
    layouts: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_noise(self) -> bool:
        """Say whether a floor was measured."""
        return self.exact is not None or bool(self.noise)


def judge_dumps(comparison: Comparison) -> Cell:
    """Return the cell of a candidate judged by a reference.

    Raises:
        DumpError: The dumps cannot be compared: `dump-not-finite`, `dump-steps`,
            `dump-no-tensors`, `layout-ambiguous`, and what `Dump` raises.
        UsageError: `compare-noise`, `compare-exact`.
    """
    reference, candidate = comparison.reference, comparison.candidate
    steps = global_steps(reference, comparison)
    exact = global_steps(comparison.exact, comparison) if comparison.exact is not None else None
    noise = [global_steps(each, comparison) for each in comparison.noise]
    _check_runs(comparison, steps, exact, noise)
    dtype = _usual_dtype(steps)
    if comparison.has_noise and len(noise) < FEWEST_RUNS:
        sources = [*(["the float64 run"] if exact else []), f"{len(noise)} noise runs"]
        comparison.notes.append(
            f"the floor comes from {' and '.join(sources)}; {FEWEST_RUNS} or more --noise make a "
            f"floor that does not hang on single draws"
        )
    shapes = {
        str(Key(RUN, step, stage, name)): tuple(value.shape)
        for step, record in enumerate(steps)
        for stage, values in record.items()
        for name, value in values.items()
    }
    comparison.notes += declare_layouts(candidate, shapes, comparison.layouts)
    with tempfile.TemporaryDirectory(prefix="spmd-verify-") as folder:
        store = _store(Path(folder), steps, exact, noise, dtype)
        statistics = _statistics(store, candidate)
        noiseless = Noiseless(store, candidate, comparison.has_noise, len(noise))

        def settle(rows: list[Row]) -> None:
            """Leave out gradients that no dump is about; settle what has no floor."""
            if not any(record["gradients"] for record in steps):
                rows[:] = [row for row in rows if row.stage != "gradients" or row.cause]
            noiseless.settle(rows)

        judgement = judge(store, statistics, axes=candidate.axes, is_anchored=False, adjust=settle)
    return _cell(comparison, judgement, dtype)


def global_steps(held: Dump, comparison: Comparison) -> list[StepRecord]:
    """Return the free run of a dump as global tensors, all stages in every step.

    Raises:
        DumpError: `dump-steps`, `dump-no-tensors`, `dump-not-finite`, and those of
            `Dump.global_tensor`.
    """
    comparison.notes += declare_layouts(held, {}, comparison.layouts if held.axes else {})
    keys = {text: Key.of(text) for text in held.keys()}  # noqa: SIM118 - a dump is no mapping
    chosen = {text: key for text, key in keys.items() if key.run == RUN}
    if not chosen:
        raise DumpError(
            f"There is nothing to compare: {held.path}. Got {len(keys)} tensors, none of the run "
            f"{RUN!r}. Keys are run|step|stage|name, or plain names of parameters",
            slug="dump-no-tensors",
        )
    numbers = sorted({key.step for key in chosen.values()})
    if numbers != list(range(len(numbers))):
        raise DumpError(
            f"Steps are missing: {held.path}. Got steps {numbers[:10]}, expected all from 0. "
            f"Number the steps of a dump from 0, in both dumps alike",
            slug="dump-steps",
        )
    steps: list[StepRecord] = [{stage: {} for stage in STAGES} for _ in numbers]
    for text, key in chosen.items():
        value = held.global_tensor(text)
        if key.stage in _FINITE_STAGES and is_rounding(value) and not bool(value.isfinite().all()):
            index = (~value.isfinite()).nonzero()[0].tolist()
            raise DumpError(
                f"A reference is not finite: {text!r} in {held.path}. Got "
                f"{value[tuple(index)].item()!r} at {index}. Nothing can be judged by it: start "
                f"with the run on one device",
                slug="dump-not-finite",
            )
        steps[key.step][key.stage][key.name] = value
    return steps


def _check_runs(
    comparison: Comparison,
    steps: Sequence[StepRecord],
    exact: Sequence[StepRecord] | None,
    noise: Sequence[Sequence[StepRecord]],
) -> None:
    """Refuse float64 and noise runs that are not the reference's computation."""
    runs = [(held, run, False) for held, run in zip(comparison.noise, noise, strict=True)]
    if comparison.exact is not None and exact is not None:
        runs.append((comparison.exact, exact, True))
    for held, run, is_exact in runs:
        for step, record in enumerate(steps):
            for stage, values in record.items():
                theirs = run[step][stage] if step < len(run) else {}
                for name, value in values.items():
                    why = _misfit(value, theirs.get(name), stage, is_exact)
                    if why and stage != "inputs":
                        flag = "--exact" if is_exact else "--noise"
                        wanted = "the reference in float64" if is_exact else "the same computation"
                        raise UsageError(
                            f"{flag} is not a run of the reference: {Key(RUN, step, stage, name)} "
                            f"in {held.path}. Got {why}, expected {wanted}, from the same initial "
                            f"state",
                            slug="compare-noise",
                        )


def _misfit(value: Tensor, other: Tensor | None, stage: str, is_exact: bool) -> str:
    """Say what keeps another run's tensor from being the reference's; empty if nothing does."""
    if other is None:
        return "no such tensor"
    if other.shape != value.shape:
        return f"shape {list(other.shape)} for {list(value.shape)}"
    if value.numel() > 1 and is_rounding(value) and is_exact:
        if other.dtype not in (torch.float64, torch.complex128):
            return f"dtype {other.dtype}"
    elif other.dtype != value.dtype and value.numel() > 1:
        return f"dtype {other.dtype} for {value.dtype}"
    if stage == "initial_state" and not torch.equal(other.to(value.dtype), value):
        return "another initial state"
    return ""


def _store(
    folder: Path,
    steps: list[StepRecord],
    exact: list[StepRecord] | None,
    noise: Sequence[list[StepRecord]],
    dtype: str,
) -> Store:
    """Write the reference and its floors as the judge reads them."""
    ensemble = Ensemble(exact or steps, steps)
    for run in (steps, *noise):
        ensemble.add(run[: len(steps)], stages=STAGES, by_element=BY_ELEMENT)
    floors = FloorTable(ensemble, [], "", unit_roundoff(dtype), is_free=True).build()
    names = tuple(f"noise {i}" for i in range(len(noise)))
    found = Noise({RUN: floors, "anchored": {}}, names, (), (), 0)
    reference = Reference(Trajectory(steps), Trajectory(exact) if exact else None, None)
    trainable = list(dict.fromkeys(name for record in steps for name in record["gradients"]))
    if not trainable:
        trainable = [name for name, value in steps[-1]["parameters"].items() if is_rounding(value)]
    write_store(folder, reference, found, dtype=dtype, trainable=trainable)
    return Store(folder)


def _statistics(store: Store, candidate: Dump) -> list[Statistics]:
    """Compare all that the ranks hold with the store."""
    found: list[Statistics] = []
    for text in candidate.keys():  # noqa: SIM118 - a dump is no mapping
        key = Key.of(text)
        if key.run != RUN or key.step >= store.index.steps:
            continue
        entry = store.entry(key.step, key.stage, key.name)
        held = candidate.locals(text)
        problem = None if entry is None else _problem(candidate, text, entry, held)
        if problem is not None:
            found.append(_problem_statistics(key, candidate, text, held, problem))
            continue
        groups: dict[Any, dict[Coordinate, Tensor]] = {}
        for coordinate, local in held.items():
            layout = candidate.layout(text, coordinate)
            fitting = local if entry is None else local.to(getattr(torch, entry.dtype))
            groups.setdefault(layout, {})[coordinate] = fitting
        for layout, parts in groups.items():
            shown = Observed(list(parts.values()), layout, list(parts))
            found += compare(
                store,
                {key.stage: {key.name: shown}},
                run=RUN,
                step=key.step,
                mesh_shape=candidate.mesh_shape,
            )
    return found


def _problem(
    candidate: Dump, text: str, entry: Entry, held: Mapping[Coordinate, Tensor]
) -> str | None:
    """Say why a tensor cannot be compared element by element, if it cannot."""
    shape, first = candidate.shape(text), next(iter(held.values()))
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype != entry.dtype and first.numel() > 1:
        return f"dtype {dtype}, expected {entry.dtype}"
    if shape is not None and list(shape) != entry.shape:
        return f"global shape {list(shape)}, expected {entry.shape}"
    has_layout = candidate.layout(text, next(iter(held))) is not None
    if not has_layout and entry.stage != "loss":
        shapes = ", ".join(dict.fromkeys(str(list(local.shape)) for local in held.values()))
        return f"parts of {shapes}: no layout makes them of {entry.shape}"
    missing = candidate.missing(text)
    return f"{missing} elements are on no rank" if missing else None


def _problem_statistics(
    key: Key, candidate: Dump, text: str, held: Mapping[Coordinate, Tensor], problem: str
) -> Statistics:
    """Return the statistics of a tensor that was not compared."""
    return Statistics(
        run=RUN,
        step=key.step,
        stage=key.stage,
        name=key.name,
        coordinates=list(held),
        layout=describe(candidate.layout(text, next(iter(held)))),
        problem=problem,
    )


def _usual_dtype(steps: Sequence[StepRecord]) -> str:
    """Return the dtype that most parameters have, or else most tensors."""
    last = steps[-1]
    values = [*last["parameters"].values()] or [
        v for stage in last.values() for v in stage.values()
    ]
    counts = Counter(str(v.dtype).removeprefix("torch.") for v in values if is_rounding(v))
    return counts.most_common(1)[0][0] if counts else "float32"


def _verdict(judgement: Judgement) -> Verdict:
    """Return the cell's verdict; without parameters all rows say whether anything is decided."""
    rows = [row for row in judgement.rows if row.verdict != Verdict.NOT_EXERCISED]
    if judgement.verdict != Verdict.ROUNDING or any(row.stage == "parameters" for row in rows):
        return judgement.verdict
    sizes = {True: 0, False: 0}
    for row in rows:
        sizes[row.verdict == Verdict.UNDETERMINED] += math.prod(row.shape)
    return Verdict.UNDETERMINED if sizes[True] > sizes[False] else judgement.verdict


def _cell(comparison: Comparison, judgement: Judgement, dtype: str) -> Cell:
    """Put a judgement into the record's form."""
    axes = comparison.candidate.axes
    skipped = sorted(
        {key.run for text in comparison.candidate.keys() if (key := Key.of(text)).run != RUN}  # noqa: SIM118
    )
    if skipped:
        comparison.notes.append(f"runs that were not compared: {', '.join(skipped)}")
    return Cell(
        case=str(comparison.candidate.path),
        style="compare",
        mesh=",".join(f"{name}={size}" for name, size in axes.items()) or "1",
        dtype=dtype,
        world_size=len(comparison.candidate.ranks),
        runner="dump",
        verdict=str(_verdict(judgement)),
        message="; ".join(dict.fromkeys([*comparison.notes, *judgement.notes])),
        cause=judgement.cause,
        first_divergence=judgement.first_divergence,
        worst=judgement.worst,
        counts={str(verdict): count for verdict, count in judgement.counts.items()},
        exercised=judgement.exercised,
        undetermined_reason=judgement.undetermined_reason,
        tensors=judgement.rows,
        unknown={
            "growth": judgement.growth,
            "undetermined_elements": judgement.undetermined_elements,
        },
    )
