"""What is known of a step of a failing cell of a per-rank style: see `semantic`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.part_runs import RAW
from spmd_verify.examination.semantic import PerRank, Semantic
from spmd_verify.layouts import Coordinate
from spmd_verify.micro_batches import micro_batches
from spmd_verify.norms import is_rounding
from spmd_verify.record import Cause, Row
from spmd_verify.reference.float64_mode import CaseDtypeDraws
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.style_ids import DATA_AXES

_WHOLE_STAGES: Final = ("module_outputs", "loss", "gradients", "buffers")
_SHOWN_DRAWS: Final = 1


def cause_of(meaning: Semantic, first: Row, found: Cause | None) -> Cause:
    """Return the cause of a difference in meaning."""
    if found is not None and found.kind == meaning.kind:
        found.remedy = meaning.remedy
        return found
    return Cause(
        kind=meaning.kind,
        text=meaning.text,
        residual=meaning.residual,
        factor=meaning.factor,
        ranks=first.ranks,
        tensors=list(meaning.tensors),
        remedy=meaning.remedy,
    )


def evidence(exhibit: Exhibit) -> PerRank:
    """Return what is known of the step that differs first."""
    parts, rounded, pieces = _parts(exhibit)
    gradients = {}
    for row in exhibit.stage_rows("gradients"):
        value = exhibit.assembled(row) if exhibit.locals(row) else None
        if value is not None and not exhibit.copies_differ(row):
            gradients[row.name] = value
    # A gradient that ranks disagree about, or that has holes, is no mean over ranks.
    is_whole = len(gradients) == sum(
        bool(exhibit.locals(row)) for row in exhibit.stage_rows("gradients")
    )
    return PerRank(
        style=exhibit.style,
        reference=_reference(exhibit),
        rounded=rounded,
        pieces=pieces,
        parts=parts if len(parts) == len(exhibit.dump.ranks) else {},
        weights=dict.fromkeys(parts, 1.0 / max(len(parts), 1)),
        gradients=gradients if is_whole else {},
        held=_held(exhibit),
        noise={
            (row.stage, row.name): row.noise or 0.0
            for stage in _WHOLE_STAGES
            for row in exhibit.stage_rows(stage)
        },
        dtype=str(exhibit.case.dtype).removeprefix("torch."),
        classes=_classes(exhibit),
        draws=_draws(exhibit),
        repeats=repeats(exhibit.axes, exhibit.alike.values()),
    )


def repeats(
    axes: Mapping[str, int], alike: Iterable[Sequence[Coordinate]]
) -> frozenset[Coordinate]:
    """Return the ranks that are given the samples of an earlier one by design.

    Ranks apart on a data axis whose samples happen to be equal are two parts all the same.

    Args:
        axes: The mesh.
        alike: Ranks whose parts are equal, in rank order.
    """
    found = set()
    for same in alike:
        seen = set()
        for at in same:
            place = tuple(i for axis, i in zip(axes, at, strict=True) if axis in DATA_AXES)
            if place in seen:
                found.add(at)
            seen.add(place)
    return frozenset(found)


_Parts = dict[Coordinate, StepRecord]


def _parts(exhibit: Exhibit) -> tuple[_Parts, _Parts, list[StepRecord]]:
    """Return what each rank's part gives, the same in the case's dtype, and its micro-batches.

    Under a pipeline a part gives the mean over its micro-batches.
    """
    count, firsts = exhibit.fact("micro_batches") or 1, exhibit.fact("stages")
    if firsts is None:
        return exhibit.part_records, exhibit.rounded_part_records, []
    parts: _Parts = {}
    rounded: _Parts = {}
    pieces: list[StepRecord] = []
    for same in exhibit.alike.values():
        batches = micro_batches(exhibit.case, exhibit.part_batches[same[0]], count)
        exact = exhibit.runs.pieces(batches, firsts)
        plain = exhibit.runs.pieces(batches, firsts, in_float64=False)
        if exact is None or plain is None:
            return {}, {}, []
        pieces.extend(exact)
        parts.update(dict.fromkeys(same, _mean(exact)))
        rounded.update(dict.fromkeys(same, _mean(plain)))
    return parts, rounded, pieces


def _mean(pieces: Sequence[StepRecord]) -> StepRecord:
    """Return gradients and losses as the mean over micro-batches, buffers as the last one left.

    A gradient that a micro-batch has not is zero there.
    """
    found: StepRecord = {"buffers": pieces[-1]["buffers"]}
    for stage in ("gradients", "loss", RAW):
        found[stage] = {
            name: torch.stack([p[stage][name] for p in pieces if name in p[stage]]).sum(0)
            / len(pieces)
            for name in dict.fromkeys(name for piece in pieces for name in piece[stage])
        }
    return found


def _reference(exhibit: Exhibit) -> StepRecord:
    """Return the whole batch's step."""
    store, step = exhibit.store, exhibit.step
    found: StepRecord = {}
    for stage in _WHOLE_STAGES:
        found[stage] = {}
        for name in store.names(step, stage):
            run = "free" if stage == "buffers" else exhibit.run
            expected = store.expected(step, stage, name)
            is_rounded = is_rounding(expected)
            found[stage][name] = store.exact(run, step, stage, name) if is_rounded else expected
    return found


def _held(exhibit: Exhibit) -> dict[tuple[int, ...], dict[str, dict[str, Tensor]]]:
    """Return loss and buffers of every rank; buffers only of the free run's first step.

    Later ones carry what earlier steps left, which each rank's part alone does not know.
    """
    stages = ("loss", "buffers") if exhibit.step == 0 else ("loss",)
    found: dict[tuple[int, ...], dict[str, dict[str, Tensor]]] = {
        at: {stage: {} for stage in stages} for at in exhibit.dump.ranks
    }
    for stage in stages:
        for row in exhibit.stage_rows(stage):
            for at, value in exhibit.locals(row).items():
                if is_rounding(value):
                    found[at][stage][row.name] = value
    return found


def _classes(exhibit: Exhibit) -> dict[str, str]:
    """Return the class of every module by its path."""
    model, _ = exhibit.runs.device.build()
    return {name or "model": type(module).__name__ for name, module in model.named_modules()}


def _draws(exhibit: Exhibit) -> list[str]:
    """Return the first operators that draw random numbers in the step, with their places."""
    tracer = CaseDtypeDraws(exhibit.case.dtype, trace=True)
    exhibit.runs.record(exhibit.batch, tracer)
    named = [f"{name.removeprefix('aten.')} at {place}" for name, place, _ in tracer.draws]
    return list(dict.fromkeys(named))[:_SHOWN_DRAWS]
