"""Plant single faults into every cell that passes, and say which would have been caught.

The controller's side: torch-free, like `run`. Design: docs/design.md 3.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from spmd_verify.exit_codes import fails
from spmd_verify.options import Options
from spmd_verify.planting import certificate as certificates
from spmd_verify.planting.certificate import (
    Certificate,
    Check,
    Outcome,
    Sensitivity,
    outcome_of,
)
from spmd_verify.planting.faults import DRY_RUN, GRADIENT_FACTOR, Collective, Fault, Watched
from spmd_verify.planting.plan import Ground, draw
from spmd_verify.record import Cell, Record, Row
from spmd_verify.run import Cells, Progress, verify
from spmd_verify.runner.specs import SURVEY_JOB, CellSpec, Survey, decode, encode
from spmd_verify.verdict import limit

# A planted cell does what the dry run did; one that takes this much longer hangs.
_PATIENCE: Final = 20.0
_LEAST_SECONDS: Final = 60.0
# How far above and below the smallest visible error the formula is checked. The candidate's
# own noise is at most one floor of the c = 4 that are allowed: half of it is hidden for sure
# (2 + 1 < 4), twice of it is seen (8 - 1 > 4).
_ABOVE, _BELOW = 2.0, 0.5


def certify(options: Options, progress: Progress) -> Record:
    """Judge every target as `verify` does, and certify every cell that passes.

    Args:
        options: Checked options.
        progress: Told what happens.

    Returns:
        The record; a certified cell has its certificate under `unknown`, see
        `certificate.of`.

    Raises:
        SpmdVerifyError: See `run.verify`.
    """
    return verify(options, progress, _certify_cell)


def _certify_cell(cells: Cells, spec: CellSpec, cell: Cell) -> None:
    """Certify one judged cell, in place; one that does not pass is left alone."""
    strict = cells.options.strict
    if cell.verdict in ("error", "unsupported") or fails(cell, strict=strict):
        return
    certificates.put(cell, _Certifying(cells, spec, cell.id).run())


@dataclass
class _Certifying:
    """One cell while it is certified."""

    cells: Cells
    spec: CellSpec
    name: str
    notes: list[str] = field(default_factory=list)
    dry: list[Watched] = field(default_factory=list)

    def run(self) -> Certificate:
        """Run the dry run, every fault of the plan and the check of the sensitivities."""
        self.cells.progress.started(f"{self.name}: dry run")
        dry_cell = self.cell(Fault(DRY_RUN))
        self.dry = _watched(dry_cell)
        if not self.dry:
            return Certificate([], [], notes=[f"the dry run failed: {dry_cell.message}"])
        patience = max(_LEAST_SECONDS, _PATIENCE * dry_cell.duration_seconds)
        seconds = min(self.spec.timeout_seconds, patience)
        self.spec = replace(self.spec, timeout_seconds=seconds)
        survey = decode(self.cells.ask_solo(SURVEY_JOB, encode(self.spec.store_path)), Survey)
        collectives = _joined(watched.collectives for watched in self.dry)
        ground = Ground(
            collectives=collectives,
            parameters=survey.parameters,
            buffers=survey.buffers,
            axes=self.spec.axes,
            dtype=self.spec.case.dtype,
            can_halve=not self.dry[0].is_graph,
        )
        if survey.unmoved:
            names = ", ".join(survey.unmoved)
            self.notes.append(f"whether it was updated cannot be told from its noise: {names}")
        options = self.cells.options
        plan = draw(ground, options.faults, options.seed)
        outcomes = [self.planted(i, len(plan), fault) for i, fault in enumerate(plan)]
        if any(outcome.status == certificates.SURVIVED for outcome in outcomes):
            self.note_reproducibility()
        return Certificate(
            outcomes=outcomes,
            sensitivities=survey.sensitivities,
            check=self.checked(survey.sensitivities),
            collectives=len(collectives),
            notes=self.notes,
        )

    def cell(self, fault: Fault) -> Cell:
        """Run and judge the cell with a fault."""
        return self.cells.cell(replace(self.spec, fault=fault))

    def planted(self, index: int, number: int, fault: Fault) -> Outcome:
        """Plant one fault and say what became of it."""
        what = f"{fault.kind}: {fault.describe()}"
        self.cells.progress.started(f"{self.name}: fault {index + 1} of {number}: {what}")
        cell = self.cell(fault)
        is_caught = cell.verdict == "error" or fails(cell, strict=self.cells.options.strict)
        watched = _watched(cell)
        is_changed = _fingerprints(watched) != _fingerprints(self.dry)
        note = ""
        if not is_changed and any(seen.has_changed for seen in watched):
            note = "it changes what is sent, and no number that is compared"
        return outcome_of(fault, cell, is_caught=is_caught, is_changed=is_changed, note=note)

    def checked(self, sensitivities: list[Sensitivity]) -> Check | None:
        """Multiply every gradient by a little more and a little less than what is visible."""
        visible = {s.tensor: s.relative for s in sensitivities if s.relative is not None}
        seen = []
        for share in (_ABOVE, _BELOW):
            self.cells.progress.started(f"{self.name}: gradients off by {share:g} of the visible")
            factors = {name: 1.0 + share * relative for name, relative in visible.items()}
            cell = self.cell(Fault(GRADIENT_FACTOR, factors=factors))
            if not cell.tensors:
                self.notes.append(f"the sensitivities could not be checked: {cell.message}")
                return None
            differing = {row.name for row in cell.tensors if _is_seen(row)}
            seen.append(len(differing & set(visible)))
        return Check(of=len(visible), seen_above=seen[0], seen_below=seen[1])

    def note_reproducibility(self) -> None:
        """Say so where the run itself never gives the same bits: nothing is equivalent then."""
        again = _watched(self.cell(Fault(DRY_RUN)))
        if _fingerprints(again) != _fingerprints(self.dry):
            self.notes.append(
                "two runs without a fault differ in bits: a fault that changes nothing cannot be "
                "told from one that survived"
            )


def _is_seen(row: Row) -> bool:
    """Say whether a gradient is shown to differ, whether or not that fails the cell.

    These are multiplied as they are read: what the optimizer used is right, and the judge says
    so of a row that it would otherwise call a mismatch.
    """
    if row.stage != "gradients" or row.ratio is None:
        return False
    least = min(limit(row.dtype, "tensor"), limit(row.dtype, "row"))
    is_open = row.verdict == "undetermined" and row.ratio > least
    return row.verdict == "mismatch" or is_open


def _watched(cell: Cell) -> list[Watched]:
    """Return what the processes of a planted cell saw; empty where they failed."""
    plain: Any = cell.unknown.get("watched", [])
    return msgspec.convert(plain, list[Watched])


def _fingerprints(watched: Iterable[Watched]) -> list[str]:
    """Return the fingerprints in rank order."""
    return [seen.fingerprint for seen in watched]


def _joined(parts: Iterable[Iterable[Collective]]) -> list[Collective]:
    """Return every collective once, with all ranks that take part."""
    found: dict[tuple[str, str, int], Collective] = {}
    for collective in (collective for part in parts for collective in part):
        known = found.get(collective.key)
        ranks = {*collective.ranks, *(known.ranks if known else ())}
        found[collective.key] = replace(known or collective, ranks=sorted(ranks))
    return list(found.values())
