"""Turn the statistics of all ranks into rows, a first divergence and a cell's verdict.

Normative: verdicts.md parts 1 and 4. The judge never sees a tensor of the candidate, nor
which runner it came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from spmd_verify.cause import Evidence, exact_norm, find_cause
from spmd_verify.compare import NO_SUCH_TENSOR
from spmd_verify.measure import Statistics
from spmd_verify.merge import Merged, TensorKey, by_tensor, merge
from spmd_verify.record import Cause, Exercised, FirstDivergence, Row, WorstTensor
from spmd_verify.rows import Fit, blank_row, growth, ratio_of, worst_row
from spmd_verify.settling import counts, mark_downstream, settle, verdict_of
from spmd_verify.stored.store import Entry, FloorInfo, Store
from spmd_verify.verdict import (
    ANCHORED_STAGES,
    LIMITS,
    STAGES,
    Verdict,
    limit,
    row_verdict,
    too_few_decided,
)

# Stages a style may leave out: nothing is concluded from their absence.
_OPTIONAL = frozenset({"inputs", "module_outputs", "clipping"})
# Where a number may be one of the rank's own part: the loss, also as what a module returns.
_PER_RANK = frozenset({"module_outputs", "loss", "eval_outputs"})
_SIGNAL_STAGES = ("gradients", "parameters")


@dataclass
class Judgement:
    """What is said of one cell.

    Attributes:
        verdict: Of the cell.
        rows: In order of (step, stage, position in the reference).
        first_divergence: The smallest (step, stage, position) that is a mismatch.
        cause: Of the first divergence.
        worst: The row with the largest error / noise.
        counts: Rows by verdict.
        exercised: Gradients and parameters with signal, of all.
        undetermined_reason: Of the first undetermined row.
        undetermined_elements: Parameter elements that nothing decides, at the last step.
        growth: Per step, the largest parameter error / noise of the free run.
        notes: What the report says besides.
    """

    verdict: Verdict
    rows: list[Row]
    first_divergence: FirstDivergence | None = None
    cause: Cause | None = None
    worst: WorstTensor | None = None
    counts: dict[str, int] = field(default_factory=dict)
    exercised: Exercised = field(default_factory=lambda: Exercised(n=0, of=0))
    undetermined_reason: str | None = None
    undetermined_elements: int = 0
    growth: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(
    store: Store,
    statistics: Iterable[Statistics],
    *,
    axes: Mapping[str, int],
    is_anchored: bool = True,
    may_keep_state: bool = True,
    adjust: Callable[[list[Row]], None] | None = None,
) -> Judgement:
    """Judge one cell.

    Args:
        store: The reference.
        statistics: Of all ranks, both runs, all steps.
        axes: Mesh axes in mesh order, `{name: ranks}`.
        is_anchored: False where anchoring was switched off: the free run decides alone.
        may_keep_state: False where state that restoring does not reach is what is looked for.
        adjust: Looks at the rows before anything is concluded from them, in place.
    """
    judging = _Judging(store, by_tensor(statistics), axes, is_anchored)
    rows = judging.rows()
    if adjust is not None:
        adjust(rows)
    settle(rows)
    if is_anchored and may_keep_state and _is_anchoring_to_blame(judging, rows):
        judging = _Judging(store, judging.statistics, axes, is_anchored=False)
        judging.notes.append(_OWN_STATE)
        rows = judging.rows()
        settle(rows)
    first = next((row for row in rows if row.verdict == Verdict.MISMATCH), None)
    mark_downstream(rows, first)
    exercised = judging.exercised(rows)
    reasons = [row.unknown.get("reason") for row in rows if row.verdict == Verdict.UNDETERMINED]
    verdict, undetermined = verdict_of(rows, store.index.steps - 1, is_exercised=exercised.n > 0)
    verdict, doubt = _in_doubt(store, verdict)
    return Judgement(
        verdict=verdict,
        rows=rows,
        first_divergence=None
        if first is None
        else FirstDivergence(step=first.step, stage=first.stage, tensor=first.name),
        cause=None if first is None else first.cause,
        worst=worst_row(rows),
        counts=counts(rows),
        exercised=exercised,
        undetermined_reason=next((str(reason) for reason in (doubt, *reasons) if reason), None),
        undetermined_elements=undetermined,
        growth=growth(rows, store.index.steps),
        notes=judging.notes,
    )


# Stages whose tensors a style may hold in parts that nobody declared.
_LAYOUTLESS: Final = ("inputs", "module_outputs", "eval_outputs", "optimizer_state")
_OWN_STATE: Final = (
    "anchoring is switched off: the style keeps state of its own that restoring parameters and "
    "optimizer state does not reach; the free run decides alone"
)


_LARGEST_LIMIT: Final = max(LIMITS.values())


def _in_doubt(store: Store, verdict: Verdict) -> tuple[Verdict, str | None]:
    """Return the verdict of an exact case, and why it is not exact where some row is in doubt."""
    doubts = store.index.exact.doubts if store.index.exact is not None else []
    if not doubts or verdict not in (Verdict.EXACT, Verdict.ROUNDING):
        return verdict, None
    reason = f"not exact: {doubts[0]}; what it reaches was judged by its noise"
    return Verdict.UNDETERMINED, reason


@dataclass
class _Judging:
    """One cell while it is judged."""

    store: Store
    statistics: Mapping[TensorKey, Sequence[Statistics]]
    axes: Mapping[str, int]
    is_anchored: bool
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note which stages of which steps the candidate showed at all."""
        self.seen = {(run, step, stage) for run, step, stage, _ in self.statistics}

    def rows(self) -> list[Row]:
        """Return all rows, in order."""
        found: list[Row] = []
        for step in range(self.store.index.steps):
            for stage in STAGES:
                run = self.deciding_run(step, stage)
                names = self.store.names(step, stage)
                for name in names:
                    row = self.row(run, step, stage, name)
                    if row is not None:
                        found.append(self.second_opinion(row))
                found.extend(self.unmatched_rows(run, step, stage, set(names)))
        return found

    def deciding_run(self, step: int, stage: str) -> str:
        """Return which run decides a stage of a step."""
        if step > 0 and self.is_anchored and stage in ANCHORED_STAGES:
            return "anchored"
        return "free"

    def second_opinion(self, row: Row) -> Row:
        """Return the anchored row where the free run decides nothing and that one does."""
        entry = self.store.entry(row.step, row.stage, row.name)
        assert entry is not None
        if row.verdict != Verdict.UNDETERMINED or not entry.is_anchored_too:
            return row
        anchored = self.row("anchored", row.step, row.stage, row.name)
        if anchored is None or anchored.verdict in (Verdict.UNDETERMINED, Verdict.NOT_EXERCISED):
            return row
        anchored.unknown["free_run"] = row.unknown.get("reason")
        return anchored

    def unmatched_rows(self, run: str, step: int, stage: str, known: set[str]) -> list[Row]:
        """Return rows of tensors that only one side has, and of gradients that neither has."""
        found = []
        for (own_run, own_step, own_stage, name), entries in self.statistics.items():
            # Hyper-parameters are compared before the steps of the free run.
            runs = (run, "free") if stage == "inputs" else (run,)
            if own_run not in runs or (own_step, own_stage) != (step, stage) or name in known:
                continue
            is_own = entries[0].problem == NO_SUCH_TENSOR
            if is_own and (stage in _OPTIONAL or stage in ("optimizer_state", "buffers")):
                continue  # the style's own modules and bookkeeping
            entry = Entry(step=step, stage=stage, name=name, shape=[], dtype="")
            merged = merge([], entries)
            found.append(self.mismatch(entry, run, merged, FloorInfo(noise=0.0, scale=0.0)))
        if stage == "gradients":
            shown = known | {row.name for row in found}
            found.extend(
                Row(
                    name=name,
                    stage=stage,
                    step=step,
                    run=run,
                    verdict=Verdict.NOT_EXERCISED,
                    unknown={"reason": "the gradient is None on both sides"},
                )
                for name in self.store.index.trainable
                if name not in shown
            )
        return found

    def row(self, run: str, step: int, stage: str, name: str) -> Row | None:
        """Return the row of one tensor of the reference; None where nothing is to be said."""
        entry = self.store.entry(step, stage, name)
        assert entry is not None
        entries = self.statistics.get((run, step, stage, name))
        if not entries:
            return self.absent(entry, run)
        merged = merge(entry.shape, entries)
        if stage in _PER_RANK and merged.values and not merged.is_exact:
            self.reduce_losses(entry, run, merged)
        floor = entry.floors.get(run, FloorInfo(noise=0.0, scale=0.0))
        row = self.measured(entry, run, merged, floor)
        if not entry.has_signal and row.verdict in (Verdict.EXACT, Verdict.ROUNDING):
            row.verdict = Verdict.NOT_EXERCISED
        return row

    def absent(self, entry: Entry, run: str) -> Row | None:
        """Return the row of a tensor that no rank showed."""
        if entry.stage in _OPTIONAL:
            return None
        # State may be kept elsewhere, or flat; a parameter that moves wrongly shows it.
        shown = (run, entry.step, entry.stage) in self.seen and entry.stage != "optimizer_state"
        floor = FloorInfo(noise=0.0, scale=0.0)
        if not shown or not entry.has_signal or entry.stage in ("loss", "eval_outputs"):
            row = blank_row(entry, run, Merged(), floor)
            row.verdict = Verdict.NOT_EXERCISED
            row.unknown["reason"] = "no rank showed it"
            return row
        merged = Merged(is_exact=False, problems=["absent on every rank"])
        return self.mismatch(entry, run, merged, floor)

    def measured(self, entry: Entry, run: str, merged: Merged, floor: FloorInfo) -> Row:
        """Return the row of a tensor that was compared."""
        if merged.problems:
            due = merged.problems[0]
            unknown = due.startswith("layout unknown") and entry.stage in _LAYOUTLESS
            if unknown or due.startswith("a reduction is still due"):
                row = blank_row(entry, run, merged, floor)
                row.verdict, row.unknown["reason"] = Verdict.UNDETERMINED, due
                return row
            return self.mismatch(entry, run, merged, floor)
        missing = math.prod(entry.shape) - merged.covered
        if missing > 0:
            merged.problems.append(f"{missing} of {math.prod(entry.shape)} elements are on no rank")
            return self.mismatch(entry, run, merged, floor)
        if merged.non_finite:
            return self.mismatch(entry, run, merged, floor)
        fit = self.against_floor(entry, run, merged, floor)
        reason = fit.reason
        verdict = row_verdict(
            is_equal=merged.is_exact,
            error=fit.error,
            noise=floor.noise,
            row_ratio=fit.row_ratio,
            limits=(limit(entry.dtype, "tensor"), limit(entry.dtype, "row"))
            if entry.floors
            else (0.0, 0.0),
            reason=reason,
        )
        if not entry.floors and verdict == Verdict.ROUNDING:
            verdict = Verdict.MISMATCH  # copied, or a dtype that does not round
        if verdict == Verdict.MISMATCH:
            row = self.mismatch(entry, run, merged, floor)
            fit.show(row)
            return row
        row = blank_row(entry, run, merged, floor)
        row.error, row.verdict = fit.error, verdict
        row.ratio = ratio_of(fit.error, floor.noise)
        if reason and verdict == Verdict.UNDETERMINED:
            row.unknown["reason"] = reason
        if floor.undetermined_elements:
            row.unknown["undetermined_elements"] = floor.undetermined_elements
        return row

    def against_floor(self, entry: Entry, run: str, merged: Merged, floor: FloorInfo) -> Fit:
        """Measure a tensor by both norms and say why its floor decides nothing, if so."""
        key = (run, entry.step, entry.stage, entry.name)
        noise_rows = self.store.rows("noise", *key)
        whole = float(merged.squares.sum().sqrt())
        if noise_rows is None or not len(noise_rows):
            return Fit(whole, floor.noise, reason=floor.reason)
        errors = merged.squares.sqrt()
        ratios = torch.where(errors > 0, errors / noise_rows, 0.0)
        row = int(ratios.argmax())
        loud = self.store.rows("undetermined", *key)
        decided = whole if loud is None else float(merged.squares[~loud].sum().sqrt())
        count = math.prod(entry.shape)
        reason = floor.reason
        if too_few_decided(floor.undetermined_elements, count):
            reason = (
                f"only rounding decides the update of {floor.undetermined_elements} of {count} "
                f"elements: their gradients are zero within noise; a probe with SGD decides"
            )
        return Fit(
            error=decided,
            noise=floor.noise,
            row=row,
            row_error=float(errors[row]),
            row_noise=float(noise_rows[row]),
            row_ratio=float(ratios[row]),
            reason=reason,
        )

    def mismatch(self, entry: Entry, run: str, merged: Merged, floor: FloorInfo) -> Row:
        """Return the row of a tensor that differs, with its cause."""
        row = blank_row(entry, run, merged, floor)
        row.verdict = Verdict.MISMATCH
        row.ranks = [_rank(coordinate, self.axes) for coordinate in merged.ranks]
        known = self.store.entry(entry.step, entry.stage, entry.name) is not None
        key = (run, entry.step, entry.stage, entry.name)
        norm = exact_norm(self.store.exact(*key)) if known else 0.0
        evidence = Evidence(entry, merged, floor.noise, norm, self.axes, row.ranks)
        row.cause = find_cause(evidence)
        if known and entry.stage in ("gradients", "clipping"):
            is_measured = norm > 0.0 and not merged.problems and not merged.non_finite
            row.unknown["share"] = evidence.error / norm if is_measured else math.inf
            row.unknown["update"] = self.update_norm(entry)
        if merged.copies_differ:
            row.unknown["copies_differ"] = True
        if merged.problems:
            row.unknown["problem"] = merged.problems[0]
        return row

    def update_norm(self, entry: Entry) -> float:
        """Return the norm of one device's update of the parameter that a gradient is of."""
        before = ("initial_state", 0) if entry.step == 0 else ("parameters", entry.step - 1)
        if self.store.entry(before[1], before[0], entry.name) is None:
            return 0.0
        if self.store.entry(entry.step, "parameters", entry.name) is None:
            return 0.0
        old = self.store.expected(before[1], before[0], entry.name)
        return exact_norm(self.store.expected(entry.step, "parameters", entry.name) - old)

    def reduce_losses(self, entry: Entry, run: str, merged: Merged) -> None:
        """Replace per-rank losses by their mean or sum where that is right, in place.

        Only where the style declared no layout: one that claims replication is held to it.
        """
        if merged.layout != "?" or len(merged.values) < 2:
            return
        exact = float(self.store.exact(run, entry.step, entry.stage, entry.name))
        noise = entry.floors[run].noise if run in entry.floors else 0.0
        allowed = limit(entry.dtype, "tensor") * noise
        own = max(abs(value - exact) for value in merged.values.values())
        total = math.fsum(merged.values.values())
        for how, value in (("mean", total / len(merged.values)), ("sum", total)):
            error = abs(value - exact)
            # In a coarse dtype the losses of parts may all be near the whole's.
            if own > noise and error <= min(own, allowed):
                merged.squares = torch.tensor([error**2], dtype=torch.float64)
                merged.layout = f"{how} over ranks"
                # Without a floor bits are compared: those of the mean are the reference's.
                merged.is_exact |= not entry.floors and error == 0.0
                if entry.stage == "loss":
                    self.notes.append(f"the loss is right as the {how} over ranks")
                return
        if entry.stage == "eval_outputs" and own > allowed:
            merged.problems.append("layout unknown: a number that each rank has of its own part")

    def exercised(self, rows: Sequence[Row]) -> Exercised:
        """Count gradients and trainable parameters with signal, by name."""
        names = {(stage, name) for stage in _SIGNAL_STAGES for name in self.store.index.trainable}
        shown = {
            (row.stage, row.name)
            for row in rows
            if row.stage in _SIGNAL_STAGES and row.verdict != Verdict.NOT_EXERCISED
        }
        return Exercised(n=len(names & shown), of=len(names))


def _is_anchoring_to_blame(judging: _Judging, rows: list[Row]) -> bool:
    """Say whether the style keeps state that restoring the model does not reach.

    Then every anchored step starts from a mixture, while the free run is right: the anchored
    error is larger than what the free run's own noise would hide.
    """
    wrong = [row for row in rows if row.verdict == Verdict.MISMATCH]
    if not wrong or any(row.run != "anchored" for row in wrong):
        return False
    alone = _Judging(judging.store, judging.statistics, judging.axes, is_anchored=False).rows()
    settle(alone)
    if any(row.verdict == Verdict.MISMATCH for row in alone):
        return False
    free = {(row.step, row.stage, row.name): row for row in alone}
    return any(
        (twin := free.get((row.step, row.stage, row.name))) is not None
        and (row.error or 0.0) > _LARGEST_LIMIT * (twin.noise or 0.0)
        for row in wrong
    )


def _rank(coordinate: Sequence[int], axes: Mapping[str, int]) -> int:
    """Return the rank at a coordinate; the last axis runs fastest."""
    rank = 0
    for index, size in zip(coordinate, axes.values(), strict=True):
        rank = rank * size + index
    return rank
