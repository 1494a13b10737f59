"""Say of each row of a failing cell of a per-rank style whether it is only one of meaning.

The step that differs first decides what the style means (`per_rank.evidence`, `semantic`). Then
every step is asked: gradients against the mean of the ranks' parts, and what follows from them
against the update that one device makes of that mean (`promised`). Later steps are asked in
their anchored run, where each starts from the reference's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import torch

from spmd_verify import causes
from spmd_verify.causes import words
from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.part_runs import HYPER
from spmd_verify.examination import per_rank
from spmd_verify.examination.promised import (
    UPDATE_STAGES,
    Held,
    Promise,
    PromisedStore,
    held,
    promise,
)
from spmd_verify.examination.semantic import PerRank, Semantic, holds, semantic
from spmd_verify.record import Cause, Cell, Row, WorstElement
from spmd_verify.settling import counts
from spmd_verify.verdict import CARRIED_STAGES, STAGES, Verdict, limit

_MISMATCH: Final = str(Verdict.MISMATCH)
_ROUNDING: Final = str(Verdict.ROUNDING)
_SEMANTIC: Final = str(Verdict.SEMANTIC)
_COUNTING: Final = ("int", "uint", "bool")  # beginnings of dtypes
# What the gradients of a step are made from, or with.
_FORWARD: Final = ("module_outputs", "loss", "gradients")


def relabel(
    exhibit: Exhibit, cell: Cell, first: Row, found: Cause | None
) -> tuple[Row, Cause | None]:
    """Make the mismatches of a cell `semantic` where they are, in place.

    Args:
        exhibit: The cell, at the step that differs first.
        cell: Its record.
        first: Its first divergence.
        found: The cause found without asking this; its words are kept where the kind agrees.

    Returns:
        The first divergence and the cause to show: those given where nothing is of meaning; the
        first tensor that is not what the style promises, where there is one.
    """
    if not exhibit.fact("is_per_rank") or first.stage in ("inputs", "initial_state"):
        return first, found
    known = per_rank.evidence(exhibit)
    meaning = semantic(known)
    if meaning is None:
        return first, found
    steps = [_Step.of(exhibit, known)]
    for index in range(exhibit.step + 1, exhibit.store.index.steps):
        if any(row.step == index and row.verdict == _MISMATCH for row in cell.tensors):
            later = _later(exhibit, cell, index)
            steps.append(_Step(later) if later is None else _Step.of(later))
            steps[-1].index = index
    for step in steps:
        step.settle(cell, steps[0])
    cell.counts = counts(cell.tensors)
    wrong = [row for row in cell.tensors if row.verdict == _MISMATCH]
    if not wrong:
        cell.verdict = _SEMANTIC
        first = _of_values(cell, first)
        # Other hypotheses are about ranks, where a pipeline has micro-batches.
        return first, per_rank.cause_of(meaning, first, None if known.pieces else found)
    cell.verdict = _MISMATCH
    order = {stage: at for at, stage in enumerate(STAGES)}
    row = min(wrong, key=lambda each: (each.step, order[each.stage]))
    step = next(each for each in steps if each.index == row.step)
    return row, _beside(step.cause(cell, row), meaning)


def _of_values(cell: Cell, first: Row) -> Row:
    """Return the first divergence that is one of values.

    Indices of a module that count the samples of a part differ by nature, and show no reader why.
    """
    meant = (row for row in cell.tensors if row.verdict == _SEMANTIC and row.step == first.step)
    told = (row for row in meant if not row.dtype.startswith(_COUNTING))
    return next(told, first) if first.dtype.startswith(_COUNTING) else first


def _later(exhibit: Exhibit, cell: Cell, index: int) -> Exhibit | None:
    """Return a later step of the anchored run; None where the dump has none."""
    prefix = f"anchored|{index}|parameters|"
    if not any(key.startswith(prefix) for key in exhibit.dump):
        return None
    rows = [
        msgspec.structs.replace(row, run="anchored", noise=_anchored_noise(exhibit, row))
        if row.step == index and row.stage in CARRIED_STAGES and row.run == "free"
        else row
        for row in cell.tensors
    ]
    return replace(exhibit, rows=rows, run="anchored", step=index)


def _anchored_noise(exhibit: Exhibit, row: Row) -> float:
    """Return the floor of a carried tensor in the anchored run; 0 where there is none."""
    entry = exhibit.store.entry(row.step, row.stage, row.name)
    floor = None if entry is None else entry.floors.get("anchored")
    return 0.0 if floor is None else floor.noise


def _beside(found: Cause, meaning: Semantic) -> Cause:
    """Return the cause of a fault in a cell that differs in meaning too."""
    found.text += f". Besides, and not wrong: {meaning.text}"
    return found


@dataclass
class _Step:
    """One step of the cell beside what the style promises of it.

    Attributes:
        exhibit: At the step; None where no anchored run shows it.
        known: What each rank's part gives.
        has_gradients: Whether gradients and losses are what is promised.
        promised: The promised update; None where it cannot be run.
        index: Which step.
    """

    exhibit: Exhibit | None
    known: PerRank | None = None
    has_gradients: bool = True
    promised: Promise | None = None
    index: int = 0

    @classmethod
    def of(cls, exhibit: Exhibit, known: PerRank | None = None) -> _Step:
        """Run what the style promises of an exhibit's step; `known` is one that holds."""
        is_right = known is not None
        known = known or per_rank.evidence(exhibit)
        is_right = is_right or holds(known)
        promised = promise(exhibit, known) if is_right else None
        if promised is None:
            return cls(exhibit, known, is_right, None, exhibit.step)
        store = PromisedStore(exhibit.store, exhibit.step, promised.exact)
        return cls(replace(exhibit, store=store), known, is_right, promised, exhibit.step)

    def settle(self, cell: Cell, first: _Step) -> None:
        """Make the mismatches of the step `semantic` where they are, in place."""
        if self.exhibit is None:
            note = (
                f"whether the update of step {self.index} is the promised one: no anchored run "
                f"shows it"
            )
            first.exhibit.runs.note(note)  # type: ignore[union-attr]
        for row in cell.tensors:
            if row.step != self.index or row.verdict != _MISMATCH:
                continue
            if self.is_fed_rightly(row):
                row.verdict = _ROUNDING
                row.unknown["explained"] = "ranks see the slices of the global input, each alike"
            elif self.is_meant(row, first):
                row.verdict = _SEMANTIC

    def is_fed_rightly(self, row: Row) -> bool:
        """Say whether a row is an input whose slices all reached forward."""
        if row.stage != "inputs" or self.exhibit is None or not self.exhibit.is_known(row):
            return False
        return self.exhibit.seen.is_wrong(row.name) is False

    def is_meant(self, row: Row, first: _Step) -> bool:
        """Say whether a row that differs is what the style promises."""
        assert first.exhibit is not None, "the first step is always shown"
        is_known = first.exhibit.is_known(row)
        if row.stage == "inputs":
            return is_known or first.is_data_dependent(row)
        if not is_known:
            return False
        if row.stage not in UPDATE_STAGES:
            return self.has_gradients or row.stage not in _FORWARD
        differ = row.stage != "clipping" and first.exhibit.copies_differ(row)
        if self.exhibit is None:
            return not differ
        if self.promised is None:
            return False
        own = self.own(row)
        found = held(self.exhibit, self.promised, own)
        if not found.is_right:
            self.show(row, own, found)
        return found.is_right and not differ

    def own(self, row: Row) -> Row:
        """Return a row of the cell as the step's exhibit has it."""
        assert self.exhibit is not None, "only asked for steps that are shown"
        key = (self.exhibit.run, row.step, row.stage, row.name)
        return self.exhibit.by_key.get(key, row)

    def is_data_dependent(self, row: Row) -> bool:
        """Say whether a hyper-parameter is one that the promised step sets otherwise."""
        if self.promised is None or self.exhibit is None:
            return False
        due = self.exhibit.store.index.hyper_parameters
        after = due[self.index + 1] if self.index + 1 < len(due) else {}
        key = row.name.partition(" of ")[0].rpartition(".")[2]
        return any(
            name.rpartition(".")[2] == key
            and not math.isclose(float(value), after.get(name, math.nan), rel_tol=1e-6)
            for name, value in self.promised.exact[HYPER].items()
            if name in after
        )

    def show(self, row: Row, own: Row, found: Held) -> None:
        """Let a row say how far it is from the promise instead of from the reference."""
        assert self.exhibit is not None, "only asked for steps that are shown"
        row.run, row.ranks, row.max_ulp = own.run, found.ranks, None
        row.error = found.error
        noise = found.tolerance / limit(row.dtype, "tensor") if found.tolerance else 0.0
        row.noise, row.ratio = noise, found.error / noise if noise else math.inf
        row.unknown["against"] = f"the update that {self.exhibit.style} promises"
        row.worst = self.worst(own)

    def worst(self, row: Row) -> WorstElement | None:
        """Return the element of a row that is farthest from the promise."""
        exhibit, promised = self.exhibit, self.promised
        assert exhibit is not None, "as above"
        assert promised is not None, "as above"
        value, candidate = promised.value(row.stage, row.name), exhibit.assembled(row)
        if value is None or candidate is None or not value.numel():
            return None
        at = int((candidate - value).abs().nan_to_num(nan=math.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)]
        actual, due = float(candidate.reshape(-1)[at]), float(value.reshape(-1)[at])
        return WorstElement(index=index[: len(row.shape)], actual=actual, expected=due)

    def cause(self, cell: Cell, row: Row) -> Cause:
        """Return why a row of the step is not what the style promises."""
        exhibit = self.exhibit
        names = words.names_of([r for r in cell.tensors if r.step == row.step
                                and r.stage == row.stage and r.verdict == _MISMATCH])  # fmt: skip
        if exhibit is not None and self.promised is not None:
            rows = []
            for each in exhibit.rows:
                if each.step == self.index and each.stage != "inputs":
                    now = exhibit_verdict(cell, each)
                    each = msgspec.structs.replace(each, verdict=now)
                rows.append(each)
            found = causes.find(replace(exhibit, rows=rows), self.own(row))
            if found is not None:
                found.text = f"judged by the update that {exhibit.style} promises: {found.text}"
                found.ranks = found.ranks or row.ranks
                return found
        why = "no known cause fits" if self.promised is not None else "nothing promised fits"
        text = f"{why} {words.listed(names)} in step {row.step}"
        return words.cause("unexplained", text, residual=row.ratio, ranks=row.ranks, tensors=names)


def exhibit_verdict(cell: Cell, row: Row) -> str:
    """Return the verdict of a row where promises are what it is judged by."""
    twin = next(
        (r for r in cell.tensors if (r.step, r.stage, r.name) == (row.step, row.stage, row.name)),
        row,
    )
    return _ROUNDING if twin.verdict == _SEMANTIC else twin.verdict
