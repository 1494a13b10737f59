"""Ask of a failing cell of a per-rank style whether it is only one of meaning: see `semantic`."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from spmd_verify.exhibit import Exhibit
from spmd_verify.float64_mode import CaseDtypeDraws
from spmd_verify.norms import is_rounding
from spmd_verify.record import Cause, Cell, Row
from spmd_verify.semantic import PerRank, Semantic, semantic
from spmd_verify.settling import counts
from spmd_verify.trajectory import StepRecord
from spmd_verify.verdict import Verdict

_WHOLE_STAGES: Final = ("module_outputs", "loss", "gradients", "buffers")
_SHOWN_DRAWS: Final = 1


def relabel(exhibit: Exhibit, cell: Cell, first: Row, found: Cause | None) -> Cause | None:
    """Make the mismatches of a cell `semantic` where they are, in place.

    Args:
        exhibit: The cell.
        cell: Its record.
        first: Its first divergence.
        found: The cause found without asking this; its words are kept where the kind agrees.

    Returns:
        The cause to show; `found` where the cell stays a mismatch.
    """
    if not exhibit.fact("is_per_rank") or first.stage in ("inputs", "initial_state"):
        return found
    meaning = semantic(evidence(exhibit))
    if meaning is None:
        return found
    for row in cell.tensors:
        if row.verdict == Verdict.MISMATCH:
            row.verdict = str(Verdict.SEMANTIC)
    cell.verdict = str(Verdict.SEMANTIC)
    cell.counts = counts(cell.tensors)
    return _cause(meaning, first, found)


def _cause(meaning: Semantic, first: Row, found: Cause | None) -> Cause:
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
    parts = exhibit.part_records
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
        rounded=exhibit.rounded_part_records,
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
    )


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
