"""The controller's side of an examination: run a failing cell again, and ask what else to run.

Torch-free. An experiment runs the cell once more under a changed case, and says whether it
passes there.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from typing import TYPE_CHECKING

import msgspec

from spmd_verify.errors import SpmdVerifyError
from spmd_verify.record import Cell, Tie
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.specs import (
    EXAMINE_JOB,
    JUDGE_JOB,
    REFERENCE_JOB,
    TIES_JOB,
    CaseSpec,
    CellEvidence,
    CellSpec,
    ExamineReport,
    ExamineRequest,
    JudgeRequest,
    ReferenceSpec,
    TiesReport,
    TiesRequest,
    decode,
    encode,
)
from spmd_verify.style_ids import data_ranks
from spmd_verify.ties.replay import judged_again

if TYPE_CHECKING:
    from spmd_verify.run import _Run


class Examiner:
    """Finds the cause of one failing cell."""

    def __init__(self, run: _Run) -> None:
        """Work with the processes of a run."""
        self.run = run

    def examined(self, spec: CellSpec, cell: Cell) -> Cell:
        """Return the cell with its cause; as it was where it cannot be run again."""
        assert cell.first_divergence is not None, "only failing cells are examined"
        folder = tempfile.mkdtemp(prefix="dump-", dir=self.run.work_dir)
        try:
            return self._examined(spec, cell, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _examined(self, spec: CellSpec, cell: Cell, folder: str) -> Cell:
        """Run a cell again with a dump, and ask until nothing more is wanted."""
        assert cell.first_divergence is not None
        # A style that may only mean something else is asked for every step: docs/design.md 3.7.
        is_per_rank = any(cell.unknown.get("facts", {}).get("is_per_rank", ()))
        last = -1 if is_per_rank else cell.first_divergence.step
        again = msgspec.structs.replace(spec, dump_path=folder, last_step=last)
        ties = self._near_ties(spec, cell)
        replay = self._replay(again) if ties else None
        if replay is not None:
            cell = self._judged_again(again, cell, replay, ties)
            if cell.first_divergence is None:
                return cell
        else:
            answer = self.run.runner.run_cell(again)
            if isinstance(answer, Failure):
                return self._unexamined(cell, f"no cause was looked for: {answer.reason}")
        experiments: dict[str, bool | None] = {}
        assert cell.first_divergence is not None, "returned above where a replay has none"
        asked = cell.first_divergence.step
        while True:
            request = ExamineRequest(
                again, encode(cell), dict(cell.unknown.get("facts", {})), experiments
            )
            answered = self.run.solo.run(
                EXAMINE_JOB, encode(request), timeout_seconds=self.run.options.timeout_seconds
            )
            if isinstance(answered, Failure):
                self.run.logs.is_kept = True
                return self._unexamined(cell, f"the examination failed: {answered.message}")
            report = decode(answered[0], ExamineReport)
            if report.wanted:
                experiments[report.wanted] = self._experiment(spec, report.wanted)
                continue
            cell = decode(report.judged, Cell)
            later = cell.first_divergence
            if later is None or later.step <= asked:
                return cell
            asked, experiments = later.step, {}
            if again.last_step < 0:
                continue
            # All of that step is right after all; what differs next is in none of the dumps.
            again = msgspec.structs.replace(again, last_step=later.step)
            # A replay has dumped all steps.
            answer = self.run.runner.run_cell(again) if replay is None else replay
            if isinstance(answer, Failure):
                return self._unexamined(cell, f"no cause was looked for: {answer.reason}")

    def _unexamined(self, cell: Cell, why: str) -> Cell:
        """Say in progress and record why the cell's cause is what the judge saw at once."""
        self.run.progress.note(f"{cell.id}: {why}")
        cell.unknown["not_run"] = [*cell.unknown.get("not_run", ()), why]
        return cell

    def _near_ties(self, spec: CellSpec, cell: Cell) -> list[Tie]:
        """Return the near ties of the cell's reference, found once for all its cells."""
        assert cell.first_divergence is not None
        if cell.first_divergence.stage == "initial_state":
            return []  # nothing was decided yet
        known = self.run.ties.get(spec.store_path)
        if known is not None:
            return known
        request = TiesRequest(spec.case, spec.store_path, _ties_path(spec))
        try:
            found = decode(self.run.ask_solo(TIES_JOB, encode(request)), TiesReport).ties
        except SpmdVerifyError as error:
            self.run.progress.note(f"{cell.id}: no near ties were looked for: {error.message}")
            found = []
        self.run.ties[spec.store_path] = found
        return found

    def _replay(self, again: CellSpec) -> CellEvidence | None:
        """Run a cell with the reference's decisions; None where it does not run so."""
        # All steps: what differs first without the flips may be a later one.
        forced = msgspec.structs.replace(again, ties_path=_ties_path(again), last_step=-1)
        answer = self.run.runner.run_cell(forced)
        if isinstance(answer, Failure):
            self.run.progress.note(f"{again.style}: near ties cannot be forced: {answer.reason}")
            return None
        return answer

    def _judged_again(
        self, again: CellSpec, cell: Cell, evidence: CellEvidence, ties: list[Tie]
    ) -> Cell:
        """Judge a replay; the cell as it was where no decision had to be forced."""
        request = JudgeRequest(again, evidence.parts, evidence.seconds)
        forced = decode(self.run.ask_solo(JUDGE_JOB, encode(request)), Cell)
        flipped = [ties[index] for index in forced.unknown.get("flipped", ())]
        return judged_again(cell, forced, flipped) if flipped else cell

    def _experiment(self, spec: CellSpec, name: str) -> bool | None:
        """Run the cell under a changed case: whether it passes there, None if it cannot run."""
        changed = changes(spec, name)
        store = tempfile.mkdtemp(prefix=f"{name}-", dir=self.run.work_dir)
        try:
            self.run.ask_solo(
                REFERENCE_JOB, encode(ReferenceSpec(changed, store, self.run.cache_path))
            )
            cell = msgspec.structs.replace(spec, case=changed, store_path=store)
            answer = self.run.runner.run_cell(cell)
            if not isinstance(answer, CellEvidence):
                return None
            request = JudgeRequest(cell, answer.parts, answer.seconds)
            judged = decode(self.run.ask_solo(JUDGE_JOB, encode(request)), Cell)
        except SpmdVerifyError as error:
            self.run.progress.note(
                f"{spec.style}, mesh {spec.mesh}: the experiment {name} could not be run: {error}"
            )
            return None
        return judged.verdict in ("exact", "rounding", "undetermined")


def _ties_path(spec: CellSpec) -> str:
    """Return the file of the near ties of a cell's reference."""
    return f"{spec.store_path}-ties"


def changes(spec: CellSpec, experiment: str) -> CaseSpec:
    """Return the case as an experiment runs it."""
    replace = functools.partial(msgspec.structs.replace, spec.case)
    overrides = spec.case.overrides
    match experiment:
        case "float64":
            return replace(dtype="float64")
        case "no_random":
            return replace(overrides={**overrides, "random": "off"})
    assert experiment == "divisible", f"no experiment is called {experiment!r}"
    return replace(overrides={**overrides, "rows": f"divisible:{data_ranks(spec.axes)}"})
