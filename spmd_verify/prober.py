"""The SGD probe: beside the user's optimizer a plain SGD step is judged. Torch-free.

Adam, layer norms and clipping hide a constant gradient factor; one step of SGD shows it. The
probe is the same style on the same case with `optimizer=sgd`, against a reference of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spmd_verify.errors import SpmdVerifyError
from spmd_verify.record import Cause, Cell, FirstDivergence, Row
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.specs import (
    JUDGE_JOB,
    REFERENCE_JOB,
    CaseReport,
    CaseSpec,
    CellEvidence,
    CellSpec,
    JudgeRequest,
    ReferenceReport,
    ReferenceSpec,
    decode,
    encode,
)
from spmd_verify.style_ids import ENGINE
from spmd_verify.verdict import Verdict

if TYPE_CHECKING:
    from spmd_verify.run import _Run

UNDER_SGD: Final = "under plain SGD:"
PROBE_RUN: Final = "probe"
# Cells beside which a probe says something. A `semantic` cell's gradients were compared with
# what its ranks compute alone, which is more than the probe would do.
_PROBED: Final = frozenset({"exact", "rounding", "undetermined", "not_exercised", "mismatch"})


class Prober:
    """Probes the cells of one case; its reference is made when the first one asks."""

    def __init__(
        self, run: _Run, case: CaseSpec, report: CaseReport, reference: ReferenceReport
    ) -> None:
        """Work with the processes of a run."""
        self.run = run
        self.case = msgspec.structs.replace(
            case, steps=1, overrides={**case.overrides, "optimizer": "sgd"}
        )
        self.report = report
        self.is_pointless = reference.is_sgd
        self.store_path = os.path.join(run.work_dir, f"probe-{len(run.record.cells)}")
        self._is_ready: bool | None = None

    def probe(self, spec: CellSpec, cell: Cell) -> None:
        """Probe a judged cell and put the outcome into it, in place."""
        if cell.verdict not in _PROBED or not self._is_asked(spec.style):
            return
        if spec.style in self.report.setups:
            self._note(f"no SGD probe of {spec.style}: setup_{spec.style} builds the optimizer")
            return
        if not self._ready():
            return
        probed = msgspec.structs.replace(spec, case=self.case, store_path=self.store_path)
        self.run.progress.started(f"{cell.id} on {cell.mesh}: SGD probe")
        answer = self.run.runner.run_cell(probed)
        if isinstance(answer, Failure):
            self._note(f"no SGD probe of {spec.style}: {answer.reason}")
            return
        judged = self._judged(probed, answer, is_examined=cell.verdict != Verdict.MISMATCH)
        if judged is None:
            return
        steps = judged.unknown.get("facts", {}).get("optimizer_steps", [])
        if steps and not any(steps):
            self._note(f"no SGD probe of {spec.style}: its step has an optimizer of its own")
            return
        put(cell, judged)

    def _is_asked(self, style: str) -> bool:
        """Say whether a style is probed: by the flag, else where it trains real modules."""
        if self.is_pointless:
            return False
        asked = self.run.options.probe
        is_named = style not in ENGINE and ":" not in style  # a place may name an engine's
        return is_named if asked is None else asked

    def _ready(self) -> bool:
        """Make the reference once; say whether there is one."""
        if self._is_ready is None:
            self._is_ready = self._make_reference()
        return self._is_ready

    def _make_reference(self) -> bool:
        """Run the case with plain SGD on one device; note why that is not possible."""
        try:
            request = encode(ReferenceSpec(self.case, self.store_path))
            found = decode(self.run.ask_solo(REFERENCE_JOB, request), ReferenceReport)
        except SpmdVerifyError as error:
            self._note(f"no SGD probe: the step does not take plain SGD: {error.message}")
            return False
        if not found.is_stepped:
            self._note("no SGD probe: the step has an optimizer of its own")
        return found.is_stepped

    def _judged(self, spec: CellSpec, evidence: CellEvidence, *, is_examined: bool) -> Cell | None:
        """Return the probe's own cell, its cause looked for only where it is the news."""
        if is_examined:
            return self.run.judged(spec, evidence)
        try:
            request = JudgeRequest(spec, evidence.parts, evidence.seconds)
            return decode(self.run.ask_solo(JUDGE_JOB, encode(request)), Cell)
        except SpmdVerifyError as error:
            self._note(f"no SGD probe of {spec.style}: {error.message}")
            return None

    def _note(self, text: str) -> None:
        """Say something of this case, once."""
        notes = self.run.record.unknown.setdefault("notes", {}).setdefault(self.case.address, [])
        if text not in notes:
            notes.append(text)
            self.run.progress.note(f"{self.case.address}: {text}")


def put(cell: Cell, probe: Cell) -> None:
    """Show a probe's verdict in a cell, in place; one that fails alone makes it a mismatch."""
    found: dict[str, Any] = {"verdict": probe.verdict}
    first, cause = probe.first_divergence, probe.cause
    if first is not None:
        found["first_divergence"] = {
            "step": first.step,
            "stage": first.stage,
            "tensor": first.tensor,
        }
    # Beside a cell that fails by itself no cause of the probe's was looked for.
    if cause is not None and not (cause.kind == "unexplained" and cell.verdict == "mismatch"):
        found["cause"] = {
            key: value
            for key in ("kind", "text", "residual", "axis", "factor", "remedy")
            if (value := getattr(cause, key)) is not None
        }
    cell.unknown["probe"] = found
    if probe.verdict != Verdict.MISMATCH or cell.verdict == Verdict.MISMATCH or first is None:
        return
    cell.verdict = str(Verdict.MISMATCH)
    cell.first_divergence = FirstDivergence(
        step=first.step,
        stage=first.stage,
        tensor=first.tensor,
        operator=first.operator,
        source=first.source,
        modules=first.modules,
        located=first.located,
    )
    cell.worst = probe.worst
    cell.cause = _prefixed(cause)
    row = _row(probe, first)
    if row is not None:
        row.run, row.cause = PROBE_RUN, cell.cause
        cell.tensors.append(row)
        cell.counts["mismatch"] = cell.counts.get("mismatch", 0) + 1


def _prefixed(cause: Cause | None) -> Cause:
    """Return a cause that says which run it is about."""
    if cause is None:
        return Cause(kind="unexplained", text=f"{UNDER_SGD} no known cause fits")
    return msgspec.structs.replace(cause, text=f"{UNDER_SGD} {cause.text}")


def _row(probe: Cell, first: FirstDivergence) -> Row | None:
    """Return the probe's first failing row."""
    place = (first.step, first.stage, first.tensor)
    return next(
        (
            row
            for row in probe.tensors
            if (row.step, row.stage, row.name) == place and row.verdict == Verdict.MISMATCH
        ),
        None,
    )
