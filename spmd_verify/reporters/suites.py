"""A record as suites of checks, for the formats of test runners. Torch-free.

A cell is a suite; what one module shows at one stage, over all tensors, steps and runs, is one
check of it. Names have no seed, value or step in them, so that a check has the same name in
every run; a suite has a failing check where its cell fails, and nowhere else. A cell that a waiver
lets pass is skipped, with the reason: readers show no text of what passes. What the gate says of
the run - a waiver that is over, a cell that is worse than its baseline - is a suite of its own.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import spmd_verify.reporters.paragraphs as paragraphs
from spmd_verify.planting import certificate
from spmd_verify.record import ROOT, Cell, Record, Row
from spmd_verify.verdict import STAGES
from spmd_verify.visible import visible

PASSED: Final = "passed"
FAILED: Final = "failed"
BROKEN: Final = "error"
SKIPPED: Final = "skipped"

# Tensors that a check's text lists; how many more there are stands below them.
MOST_ROWS: Final = 20
# What the name of one row has and that of another run may not: a second value of one name in a
# step, the second tensor of a tie that is broken. See `observe.Observer`.
_REPEATED: Final = re.compile(r"[#@]\d+$")
_OF_A_PARAMETER: Final = frozenset({"initial_state", "gradients", "parameters", "buffers"})
_OF_A_MODULE: Final = frozenset({"module_outputs", "eval_outputs"})
_CELL: Final = "cell"
_GATE: Final = "spmd-verify.gate"


@dataclass(frozen=True)
class Check:
    """What one module shows at one stage.

    Attributes:
        name: Unique in its suite.
        status: `PASSED`, `FAILED`, `BROKEN` or `SKIPPED`.
        verdict: The word of the record that decided.
        message: One line; empty where it passed.
        text: All that is to be said, in lines; may be there where it passed: a warning.
    """

    name: str
    status: str
    verdict: str
    message: str = ""
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """One cell.

    Attributes:
        cell: What it is made from; None for what is said of the run.
        name: Unique in its record; case, style, mesh and dtype.
        checks: At least one.
    """

    cell: Cell | None
    name: str
    checks: tuple[Check, ...]

    @property
    def seconds(self) -> float:
        """Return what the cell took; 0 where the record has no number for it."""
        seconds = 0.0 if self.cell is None else self.cell.duration_seconds
        return seconds if math.isfinite(seconds) else 0.0

    def count(self, status: str) -> int:
        """Count the checks of a status."""
        return sum(check.status == status for check in self.checks)


def suites(record: Record) -> list[Suite]:
    """Return one suite for every cell, in the record's order, and what is said of the run."""
    names = _unique(suite_name(cell) for cell in record.cells)
    found = []
    for name, cell in zip(names, record.cells, strict=True):
        checks = _checks(record, cell)
        if paragraphs.is_certified(record) and cell.verdict not in ("error", "unsupported"):
            checks.append(_certificate(cell))
        told = _unique(check.name for check in checks)
        renamed = (
            Check(name, check.status, check.verdict, check.message, check.text)
            for name, check in zip(told, checks, strict=True)
        )
        found.append(Suite(cell, name, tuple(renamed)))
    return [*found, *_gate(record)]


def _gate(record: Record) -> list[Suite]:
    """Return what is worse than the baseline, and what the gate warns of; no suite for nothing."""
    checks = [
        Check(f"baseline: {name}", FAILED, "regressed", text, (f"{name}: {text}",))
        for name, text in paragraphs.regressions(record)
    ]
    if warnings := paragraphs.warnings(record):
        checks.append(Check("warnings", SKIPPED, "warning", warnings[0], tuple(warnings)))
    return [Suite(None, _GATE, tuple(checks))] if checks else []


def suite_name(cell: Cell) -> str:
    """Return `model.py.ddp [dp=2, float32]`.

    Jenkins takes what stands before the last dot for a package: that is the case.
    """
    return visible(f"{cell.case}.{cell.style} [{cell.mesh}, {cell.dtype}]")


def module_of(row: Row) -> str:
    """Return the module that a row belongs to; the root for what belongs to the whole step."""
    name = _REPEATED.sub("", row.name)
    if row.stage in _OF_A_MODULE:
        return name or ROOT
    if row.stage == "optimizer_state":
        return name.rpartition(".")[0].rpartition(".")[0] or ROOT
    if row.stage in _OF_A_PARAMETER:
        return name.rpartition(".")[0] or ROOT
    return ROOT


def _checks(record: Record, cell: Cell) -> list[Check]:
    """Return the checks of one cell."""
    is_failing = paragraphs.fails(record, cell)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in cell.tensors:
        groups.setdefault((row.stage, module_of(row)), []).append(row)
    order = {stage: at for at, stage in enumerate(STAGES)}
    keys = sorted(groups, key=lambda key: order.get(key[0], len(order)))
    checks = [
        _check(cell, f"{module}: {stage}", groups[stage, module], is_failing=is_failing)
        for stage, module in keys
    ]
    bad = BROKEN if cell.verdict == "error" else FAILED if is_failing else PASSED
    is_untold = bad != PASSED and all(check.status != bad for check in checks)
    why = paragraphs.waiver(cell)
    if not checks or is_untold or (why and all(why not in check.message for check in checks)):
        checks.append(_whole(cell, bad))
    return checks


def _check(cell: Cell, name: str, rows: Sequence[Row], *, is_failing: bool) -> Check:
    """Return what some rows say together."""
    verdicts = {row.verdict for row in rows}
    told = [row for row in rows if row.verdict not in ("exact", "rounding")]
    if wrong := [row for row in rows if row.verdict in ("mismatch", "semantic")]:
        worst = max(wrong, key=_weight)
        text = (*_why(cell, wrong), *_listed(wrong))
        message, status = _one_line(worst), FAILED if is_failing else PASSED
        if not is_failing and (why := paragraphs.waiver(cell)):
            message, status, text = f"{why}; {message}", SKIPPED, (why, *text)
        return Check(visible(name), status, worst.verdict, message, text)
    if "undetermined" in verdicts:
        undetermined = [row for row in rows if row.verdict == "undetermined"]
        message = _one_line(undetermined[0])
        return Check(visible(name), SKIPPED, "undetermined", message, tuple(_listed(told)))
    if verdicts == {"not_exercised"}:
        text = tuple(_listed(rows))
        return Check(visible(name), SKIPPED, "not_exercised", "not exercised: no signal", text)
    return Check(visible(name), PASSED, "rounding" if "rounding" in verdicts else "exact")


def _whole(cell: Cell, bad: str) -> Check:
    """Return the check of a cell that its rows, if there are any, do not tell."""
    why = paragraphs.waiver(cell)
    is_skipped = bad == PASSED and (why or cell.verdict in ("unsupported", "undetermined"))
    status = SKIPPED if is_skipped else bad
    lines = [*([why] if why else []), *paragraphs.paragraph(cell)]
    if status == PASSED:
        return Check(_CELL, status, cell.verdict)
    message = lines[0] if lines else cell.verdict
    return Check(_CELL, status, cell.verdict, message, (paragraphs.heading(cell), *lines))


def _certificate(cell: Cell) -> Check:
    """Return whether faults that were planted in a cell were caught."""
    found = certificate.of(cell)
    name = "certificate"
    if found is None:
        text = "no certificate: no fault was planted"
        return Check(name, FAILED, "survived", text, (text,))
    survived = [each for each in found.outcomes if each.status == certificate.SURVIVED]
    message = f"{found.count(certificate.CAUGHT)} of {found.counted} planted faults caught"
    lines = (message, *(visible(f"survived: {each.kind}: {each.fault}") for each in survived))
    status = FAILED if certificate.is_open(cell) else PASSED
    return Check(name, status, "survived" if survived else "caught", message, lines)


def _why(cell: Cell, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cell's paragraph where its first divergence is one of the rows."""
    first = paragraphs.first_row(cell)
    if first is None or all(row is not first for row in rows):
        return ()
    return (paragraphs.heading(cell), *paragraphs.paragraph(cell), "")


def _listed(rows: Sequence[Row]) -> list[str]:
    """Return one line for each of the first rows, and how many there are besides."""
    lines = [_one_line(row) for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"... and {len(rows) - MOST_ROWS} more")
    return lines


def _one_line(row: Row) -> str:
    """Return where a row is and what is said of it."""
    words = [f"step {row.step}, {row.run}: {row.name}: {row.verdict}"]
    if row.error is not None:
        words.append(f"error / noise {paragraphs.over(row.error, row.noise, row.ratio)}")
    if row.cause is not None:
        words.append(f"{row.cause.kind}: {row.cause.text}")
    if row.downstream_of:
        words.append(f"downstream of {row.downstream_of}")
    if reason := row.unknown.get("reason"):
        words.append(str(reason))
    return visible("; ".join(words))


def _weight(row: Row) -> tuple[bool, bool, float]:
    """Order rows: a mismatch over what is by design, a cause over what follows, then the ratio."""
    ratio = row.ratio if row.ratio is not None and row.ratio == row.ratio else 0.0
    return row.verdict == "mismatch", row.downstream_of is None, ratio


def _unique(names: Iterable[str]) -> list[str]:
    """Give a name that is there before a number: GitLab drops the second of two."""
    seen: set[str] = set()
    found = []
    for name in names:
        unique, number = name, 2
        while unique in seen:
            unique, number = f"{name} ({number})", number + 1
        seen.add(unique)
        found.append(unique)
    return found
