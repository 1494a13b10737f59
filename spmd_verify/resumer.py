"""The resume check: a style whose cell passes is saved, loaded and continued. Torch-free.

Every way runs as a cell of its own against the same reference (`runner.resumed`): in memory and
through a checkpoint on the cell's mesh, and from that checkpoint on another number of ranks. What
fails is put into the cell; see docs/variants.md.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spmd_verify.errors import SpmdVerifyError
from spmd_verify.record import Cause, Cell, FirstDivergence, Row
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.processes import ProcessRunner
from spmd_verify.runner.specs import (
    JUDGE_JOB,
    CaseReport,
    CellSpec,
    JudgeRequest,
    Resume,
    decode,
    encode,
)
from spmd_verify.verdict import Verdict

if TYPE_CHECKING:
    from spmd_verify.run import _Run

RESUMED_RUN: Final = "resumed"
CHECKPOINT: Final = "checkpoint"
# Of a cell that fails, or is only right per rank, a resumed step says nothing of its own.
_CHECKED: Final = frozenset({"exact", "rounding", "undetermined", "not_exercised"})
_STATE_STAGES: Final = ("parameters", "buffers", "optimizer_state")
_REMEDY: Final = (
    "Keep what later steps need where state_dict finds it: persistent buffers, the optimizer's "
    "state and its groups"
)


@dataclass(frozen=True)
class Outcome:
    """How one way of resuming ended.

    Attributes:
        way: `state_dict`, `checkpoint` or `live`.
        mesh: Where it was loaded.
        verdict: Of the resumed cell; `unsupported` or `error` where there is none.
        reason: Why there is none.
        cell: The judged cell.
        ways: The ways that the style has.
    """

    way: str
    mesh: str
    verdict: str
    reason: str = ""
    cell: Cell | None = None
    ways: Sequence[str] = ()

    def entry(self) -> dict[str, Any]:
        """Return what the record keeps."""
        found: dict[str, Any] = {"way": self.way, "mesh": self.mesh, "verdict": self.verdict}
        if self.reason:
            found["reason"] = self.reason
        first = None if self.cell is None else self.cell.first_divergence
        if first is not None:
            found["first_divergence"] = {
                "step": first.step,
                "stage": first.stage,
                "tensor": first.tensor,
            }
        return found

    def in_words(self) -> str:
        """Return one phrase of the report."""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.way} on {self.mesh} {self.verdict}{why}"


class Resumer:
    """Checks the cells of one case; keeps ranks of its own for other mesh sizes."""

    def __init__(self, run: _Run, report: CaseReport) -> None:
        """Work with the processes of a run."""
        self.run = run
        self.report = report
        self._others: ProcessRunner | None = None

    def stop(self) -> None:
        """End the ranks of other mesh sizes."""
        if self._others is not None:
            self._others.stop()
            self._others = None

    def check(self, spec: CellSpec, cell: Cell) -> None:
        """Resume a judged cell every way there is and put the outcome into it, in place."""
        if not self.run.options.resume_check or not cell.tensors:
            return
        if cell.verdict not in _CHECKED:
            cell.unknown["resume"] = []
            _say(cell, f"not resumed: the cell is {cell.verdict}")
            return
        folder = tempfile.mkdtemp(prefix="resume-", dir=self.run.work_dir)
        try:
            found = list(self._resumed(spec, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        cell.unknown["resume"] = [outcome.entry() for outcome in found]
        _say(cell, "resumed: " + "; ".join(outcome.in_words() for outcome in found))
        for outcome in found:
            put(cell, outcome)

    def _resumed(self, spec: CellSpec, folder: str) -> Iterator[Outcome]:
        """Give the outcome of every way."""
        path = os.path.join(folder, CHECKPOINT)
        first = self._ask(spec, Resume("", path, is_saving=True))
        yield first
        if CHECKPOINT not in first.ways:
            return
        loading = Resume(CHECKPOINT, path, is_saving=False)
        yield self._ask(spec, loading)
        if spec.style in self.report.meshes:
            return  # a mesh of the file's own is the only one that its style promises
        for other in self._other_sizes(spec):
            outcome = self._ask(other, loading)
            # Where half the ranks do not take the batch, twice as many may.
            if outcome.verdict != "unsupported":
                yield outcome
                return

    def _other_sizes(self, spec: CellSpec) -> Iterator[CellSpec]:
        """Give the cell on other sizes of its first axis: half of it, twice, one."""
        (axis, size), *rest = spec.axes.items()
        sizes = [size // 2] if size % 2 == 0 and size > 2 else []
        sizes += [size * 2, *([1] if size == 2 else [])]
        for number in sizes:
            axes = {axis: number, **dict(rest)}
            if math.prod(axes.values()) <= self.run.options.rank_limit:
                mesh = ",".join(f"{name}={ranks}" for name, ranks in axes.items())
                yield msgspec.structs.replace(spec, axes=axes, mesh=mesh)

    def _ask(self, spec: CellSpec, resume: Resume) -> Outcome:
        """Run and judge one way."""
        wanted = msgspec.structs.replace(spec, resume=resume)
        way = resume.way or "state"
        self.run.progress.started(
            f"{spec.case.address}/{spec.style} on {spec.mesh}: resumed by {way}"
        )
        answer = self._runner(spec).run_cell(wanted)
        if isinstance(answer, Failure):
            verdict = "unsupported" if answer.kind == "refused" else "error"
            return Outcome(way, spec.mesh, verdict, answer.reason)
        try:
            request = JudgeRequest(wanted, answer.parts, answer.seconds)
            cell = decode(self.run.ask_solo(JUDGE_JOB, encode(request)), Cell)
        except SpmdVerifyError as error:
            return Outcome(way, spec.mesh, "error", error.message)
        ways = cell.unknown["facts"]["ways"][0]
        return Outcome(resume.way or ways[0], spec.mesh, cell.verdict, "", cell, ways)

    def _runner(self, spec: CellSpec) -> Any:
        """Return the ranks of a mesh: the run's own for its meshes."""
        sizes = {mesh.num_ranks for mesh in self.run.options.meshes}
        if spec.is_lockstep or spec.num_ranks in sizes:
            return self.run.runner
        if self._others is None:
            self._others = ProcessRunner(
                work_dir=self.run.work_dir, log_dir=self.run.logs.path, name="resumed"
            )
        return self._others


def put(cell: Cell, outcome: Outcome) -> None:
    """Make a cell fail where a way of resuming fails, in place; the first such is its cause."""
    if outcome.verdict == "error" and cell.verdict != Verdict.MISMATCH:
        cell.verdict = str(Verdict.ERROR)
        return
    judged = outcome.cell
    if outcome.verdict != Verdict.MISMATCH or judged is None or judged.first_divergence is None:
        return
    rows = [row for row in judged.tensors if row.verdict == Verdict.MISMATCH]
    for row in rows:
        row.run = RESUMED_RUN
    cell.tensors.extend(rows)
    cell.counts["mismatch"] = cell.counts.get("mismatch", 0) + len(rows)
    if cell.verdict == Verdict.MISMATCH:
        return
    first = judged.first_divergence
    cell.verdict, cell.worst = str(Verdict.MISMATCH), judged.worst
    cell.first_divergence = FirstDivergence(step=first.step, stage=first.stage, tensor=first.tensor)
    cell.cause = _cause(outcome, rows, first)


def _cause(outcome: Outcome, rows: Sequence[Row], first: FirstDivergence) -> Cause:
    """Return what was not saved, as far as the state after loading says."""
    lost = [row.name for row in rows if row.step == first.step and row.stage in _STATE_STAGES]
    where = f"resumed by {outcome.way} on {outcome.mesh}:"
    is_loaded = outcome.cell is not None and first.step == outcome.cell.tensors[-1].step
    if not is_loaded:
        said = f"after loading, {first.stage} differ: {_listed(lost)}"
    elif first.stage == "inputs":
        said = f"{first.tensor} is not what it was before step {first.step}"
    else:
        said = (
            f"all that state dicts hold is right after loading, and step {first.step} differs: it "
            f"uses something that is in none of them, an attribute of a module or of the optimizer"
        )
    return Cause(
        kind="resume", text=f"{where} {said}", tensors=lost or [first.tensor], remedy=_REMEDY
    )


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as a list; of many the first ones and how many more."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _say(cell: Cell, text: str) -> None:
    """Add a phrase to a cell's notes."""
    cell.message = f"{cell.message}; {text}" if cell.message else text
