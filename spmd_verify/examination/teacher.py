"""The controller's side of teacher forcing: find the module that contains a fault. Torch-free.

A failing step of an eager style is run again with the reference fed in at the boundaries of
its modules up to some place. Where everything after that place is then right, the fault lies
before it; the first such place is found by bisection. Design: docs/design.md 3.11.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spmd_verify.examination.bisection import Outcome, Search, Stopped
from spmd_verify.examination.flow import KNOWN, Flow, side
from spmd_verify.record import ROOT, Cell, Row
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.specs import (
    FEEDING_JOB,
    JUDGE_JOB,
    CellReport,
    CellSpec,
    Feeding,
    FeedingPlan,
    FeedingRequest,
    JudgeRequest,
    decode,
    encode,
)
from spmd_verify.style_ids import ENGINE, data_ranks
from spmd_verify.verdict import Verdict

if TYPE_CHECKING:
    from spmd_verify.run import _Run

# By the stage of the first divergence: what is fed in.
_DIRECTIONS: Final = {"module_outputs": "values", "loss": "values", "gradients": "gradients"}
# More modules than this are counted, not listed.
_MOST_NAMES: Final = 6
# A scale within this share of 1 or of the ranks of a mean is that number.
_SCALE_NOISE: Final = 0.02


class Teacher:
    """Locates the faults of failing cells."""

    def __init__(self, run: _Run) -> None:
        """Work with the processes of a run."""
        self.run = run

    def locate(self, spec: CellSpec, cell: Cell) -> None:
        """Name the module that contains a cell's fault in its first divergence, in place.

        Does nothing for cells that are not about the forward or backward of a real module. A
        run that fails is noted; the cell stays what it is.
        """
        first = cell.first_divergence
        is_asked = spec.style not in ENGINE and not spec.is_lockstep and spec.fault is None
        if first is None or not is_asked or cell.verdict != Verdict.MISMATCH:
            return
        if first.stage not in _DIRECTIONS or "exact" in spec.case.overrides:
            return
        folder = tempfile.mkdtemp(prefix="feeding-", dir=self.run.work_dir)
        try:
            first.located, first.modules = _Lesson(self.run, spec, cell, folder).found()
        except Stopped as stop:
            cell.unknown["not_located"] = str(stop)
            self.run.progress.note(f"{cell.id}: teacher forcing named no module: {stop}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Lesson:
    """One failing step, run again with the reference fed in."""

    run: _Run
    spec: CellSpec
    cell: Cell
    folder: str
    runs: int = 0
    most_runs: int = 0
    tolerances: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note what is wrong."""
        first = self.cell.first_divergence
        assert first is not None, "only failing cells are located"
        self.step = first.step
        self.direction = _DIRECTIONS[first.stage]
        rows = [row for row in self.cell.tensors if row.step == self.step and _is_wrong(row)]
        place = (first.stage, first.tensor)
        self.run_name = next((r.run for r in rows if (r.stage, r.name) == place), "free")
        self.rows = {row.name: row for row in rows if row.stage in ("loss", "gradients")}
        self.deadline = time.monotonic() + self.spec.timeout_seconds

    def found(self) -> tuple[str, list[str]]:
        """Return the line for the report, and the modules it names.

        Raises:
            Stopped: A run failed, or nothing can be said.
        """
        self._ran([], is_watching=True)
        flow = self._explained()
        if flow.is_forward and not self._is_forward_wrong(flow):
            self.direction = "gradients"
            flow = self._explained()
        self.most_runs = 2 * math.ceil(math.log2(max(len(flow.boundaries), 2))) + 2
        search = Search(flow, self.rows, self._outcome, self._may_run)
        place = search.place()
        if place is None:
            text, names = self._beyond(flow, search)
        else:
            at = dict.fromkeys(flow.module_at(i) for i in (*search.others(place), place))
            names = list(at) if flow.is_forward else list(at)[::-1]
            text = _text(flow, names, place)
        return f"{text} ({self.runs} runs)", names

    def _is_forward_wrong(self, flow: Flow) -> bool:
        """Say whether forward is to blame: the loss or what the model returns is wrong.

        Outputs inside may differ from one device's and be right all the same.
        """
        is_loss = any(row.stage == "loss" for row in self.rows.values())
        returned = [b for b in flow.boundaries if b.module == ROOT and not b.is_input]
        has_gradients = any(row.stage == "gradients" for row in self.rows.values())
        return is_loss or not has_gradients or any(flow.is_wrong(b) for b in returned)

    def _beyond(self, flow: Flow, search: Search) -> tuple[str, list[str]]:
        """Say where a fault is that feeding in the reference everywhere does not repair.

        Raises:
            Stopped: It cannot be said.
        """
        place, outcome = search.last()
        last = flow.boundaries[place]
        if flow.is_forward:
            if outcome.off:
                raise Stopped("nothing that is fed in repairs the step")
            return (
                f"behind the {side(last)}: with the reference's value fed in at every module up to "
                f"there the loss is still wrong"
            ), []
        is_open = flow.first_open < len(flow.boundaries)
        if is_open or any(boundary.finding == "wrong" for boundary in flow.boundaries):
            raise Stopped("nothing that is fed in repairs the gradients")
        left = [name for name in self.rows if name in outcome.wrong]
        owners = list(dict.fromkeys(flow.owner(name) for name in left))
        if len(owners) == 1 and owners != [ROOT]:
            return (
                f"{owners[0]}: the gradient fed to it and the one it passes on are right, those of "
                f"its own parameters are not"
            ), owners
        where, ranks = "after backward", float(data_ranks(self.spec.axes))
        if all(abs(flow.scale / due - 1.0) > _SCALE_NOISE for due in (1.0, ranks)):
            times = f"{flow.scale:.6g} x one device's gradient enters"
            where = f"in the scale of the loss ({times}) or {where}"
        return (
            f"{where}: every module's own backward is right; with the reference's gradient fed in "
            f"at every module the same gradients are wrong"
        ), []

    # -- runs --------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        """Say whether there is time for another run."""
        return self.runs < self.most_runs and time.monotonic() < self.deadline

    def _explained(self) -> Flow:
        """Learn what every boundary is in the direction of flow; write what may be fed in."""
        request = FeedingRequest(msgspec.structs.replace(self.spec, feeding=self._feeding([])))
        plan = decode(self._alone(FEEDING_JOB, encode(request)), FeedingPlan)
        if plan.problem:
            raise Stopped(f"one device cannot be watched: {plan.problem}")
        order = plan.boundaries if self.direction == "values" else plan.boundaries[::-1]
        flow = Flow(self.direction, order, next(iter(plan.scales), 1.0))
        # What is no part of the reference, such as a summand, deviates by right.
        held = (b for b in order if b.finding in KNOWN or flow.is_wrong(b))
        self.tolerances = {b.key: b.tolerance for b in held}
        return flow

    def _outcome(self, fed: list[str]) -> Outcome:
        """Run the step with the reference fed in at some boundaries."""
        spec, parts = self._ran(fed)
        answer = self._alone(JUDGE_JOB, encode(JudgeRequest(spec, parts, 0.0)))
        wrong = {
            row.name
            for row in decode(answer, Cell).tensors
            if row.step == self.step and row.stage in ("loss", "gradients") and _is_wrong(row)
        }
        return Outcome(frozenset(wrong), frozenset(self._off(parts)))

    def _off(self, parts: Iterable[bytes]) -> set[str]:
        """Return the boundaries at which a rank deviates by more than noise."""
        found = set()
        for part in parts:
            norms: dict[str, Any] = decode(part, CellReport).facts["boundaries"]
            # Written so that NaN is a deviation.
            found |= {k for k, v in norms.items() if not v <= self.tolerances.get(k, math.inf)}
        return found

    def _ran(self, fed: list[str], *, is_watching: bool = False) -> tuple[CellSpec, list[bytes]]:
        """Run the step once more and return how, and what every rank reports."""
        self.runs += 1
        feeding = self._feeding(fed, is_watching=is_watching)
        spec = msgspec.structs.replace(self.spec, feeding=feeding)
        answer = self.run.runner.run_cell(spec)
        if isinstance(answer, Failure):
            raise Stopped(answer.reason)
        return spec, answer.parts

    def _alone(self, function: str, payload: bytes) -> bytes:
        """Run a job in the reference worker; its failure ends the search and nothing else."""
        answer = self.run.solo.run(function, payload, timeout_seconds=self.spec.timeout_seconds)
        if isinstance(answer, Failure):
            raise Stopped(answer.reason)
        return answer[0]

    def _feeding(self, fed: list[str], *, is_watching: bool = False) -> Feeding:
        """Return what a run of the step is told."""
        return Feeding(
            self.run_name, self.step, self.folder, self.direction, fed, is_watching=is_watching
        )


def _text(flow: Flow, names: list[str], place: int) -> str:
    """Return the line that names modules."""
    what, rest = "value", "everything after it is right"
    if not flow.is_forward:
        what, rest = "gradient", "every gradient computed from it is right"
    if len(names) > 1:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        listed = ", ".join(names[:_MOST_NAMES]) + more
        return f"{listed}: each is wrong although all it gets is the reference's {what}"
    here, before = flow.boundaries[place], flow.before(place)
    name = names[0]
    if name == ROOT and before is not None:
        ends = (before, here) if flow.is_forward else (here, before)
        name = f"{ROOT}, between the {side(ends[0])} and the {side(ends[1])}"
    if here.finding == "summand":
        return (
            f"{name}: the {what} at the {side(here)} is each rank's summand; with the "
            f"reference's sum fed in there {rest}"
        )
    return f"{name}: with the reference's {what} fed in at the {side(here)} {rest}"


def _is_wrong(row: Row) -> bool:
    """Say whether a row is a mismatch."""
    return row.verdict == Verdict.MISMATCH
