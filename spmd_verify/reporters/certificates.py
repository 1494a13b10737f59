"""The terminal report of `certify`: what a green table would have caught. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tabulate import tabulate

import spmd_verify.reporters.terminal as terminal
from spmd_verify.exit_codes import fails
from spmd_verify.planting import certificate as certificates
from spmd_verify.planting.certificate import (
    CAUGHT,
    EQUIVALENT,
    NOT_PLANTED,
    SURVIVED,
    Certificate,
)
from spmd_verify.planting.faults import EXPECTED_CAUSES, KINDS
from spmd_verify.record import Cell, Record
from spmd_verify.visible import visible

_HEADERS: Final = (
    "style",
    "mesh",
    "dtype",
    "caught",
    "named",
    "equivalent",
    "visible, median",
    "visible, worst",
)
_NOTHING: Final = "-"


def render(record: Record, *, verbosity: int = 0) -> str:
    """Return the report as text without a final newline.

    Args:
        record: A finished record.
        verbosity: 1 adds every fault and what is visible in every tensor.
    """
    certified = _certified(record)
    blocks = _planted(record)
    if verbosity > 0:
        for cell, found in certified:
            blocks += [_faults(cell, found), _sensitivities(cell, found)]
    strict = bool(record.settings.get("strict"))
    if any(fails(c, strict=strict) or c.verdict in ("error", "unsupported") for c in record.cells):
        blocks.append(terminal.render(record))
    blocks.append(_summary(record.cells, certified))
    return "\n\n".join(block for block in blocks if block)


def planted(record: Record) -> str:
    """Return the part about planted faults, without a final newline."""
    blocks = [*_planted(record), _summary(record.cells, _certified(record))]
    return "\n\n".join(block for block in blocks if block)


def _certified(record: Record) -> list[tuple[Cell, Certificate]]:
    """Return the cells that have a certificate."""
    return [(cell, found) for cell in record.cells if (found := certificates.of(cell))]


def _planted(record: Record) -> list[str]:
    """Return the tables of what was planted, and what survived in each cell."""
    certified = _certified(record)
    blocks = [_table(record.cells), _kinds([found for _, found in certified])]
    return [*blocks, *(_survivors(cell, found) for cell, found in certified)]


def _table(cells: Sequence[Cell]) -> str:
    """Return one line per cell."""
    has_cases = len({cell.case for cell in cells}) > 1
    lines = [[cell.case] * has_cases + _line(cell) for cell in cells]
    headers = ["case"] * has_cases + list(_HEADERS)
    return str(tabulate(_seen(lines), headers=headers, disable_numparse=True))


def _line(cell: Cell) -> list[str]:
    """Return the columns of one cell."""
    found = certificates.of(cell)
    if found is None:
        return [cell.style, cell.mesh, cell.dtype, cell.verdict, *[_NOTHING] * 4]
    worst = found.worst
    caught = found.count(CAUGHT)
    return [
        cell.style,
        cell.mesh,
        cell.dtype,
        _share(caught, found.counted),
        _share(found.named, caught),
        str(found.count(EQUIVALENT)),
        _relative(found.median),
        f"{_relative(worst.relative)} ({worst.tensor})" if worst else _NOTHING,
    ]


def _kinds(found: Sequence[Certificate]) -> str:
    """Return the table by kind of fault, over all cells."""
    lines = []
    for kind in KINDS:
        counts = {
            status: sum(certificate.count(status, kind) for certificate in found)
            for status in (CAUGHT, SURVIVED, EQUIVALENT)
        }
        if not any(counts.values()):
            continue
        of_kind = [o for certificate in found for o in certificate.outcomes if o.kind == kind]
        said = sorted({o.cause for o in of_kind if o.status == CAUGHT and o.cause})
        lines.append(
            [
                kind,
                _share(counts[CAUGHT], counts[CAUGHT] + counts[SURVIVED]),
                _share(sum(o.is_named for o in of_kind), counts[CAUGHT]),
                ", ".join(said) or _NOTHING,
                ", ".join(sorted(EXPECTED_CAUSES[kind])),
            ]
        )
    headers = ("planted", "caught", "named", "cause said", "cause expected")
    return str(tabulate(_seen(lines), headers=headers, disable_numparse=True)) if lines else ""


def _survivors(cell: Cell, found: Certificate) -> str:
    """Return what was not caught in a cell, and what could not be judged."""
    lines = [
        f"  {outcome.status}: {outcome.kind}: {outcome.fault}"
        + (f" ({outcome.note})" if outcome.note else "")
        for outcome in found.outcomes
        if outcome.status in (SURVIVED, NOT_PLANTED)
    ]
    lines += [f"  note: {note}" for note in found.notes]
    if found.check is not None and found.check.seen_above < found.check.of:
        check = found.check
        lines.append(
            f"  note: {check.of - check.seen_above} of {check.of} gradients were not seen to "
            f"differ at twice the error that should be visible"
        )
    heading = f"{cell.id}, mesh {cell.mesh}, {cell.dtype}"
    return "\n".join(visible(line) for line in (heading, *lines)) if lines else ""


def _faults(cell: Cell, found: Certificate) -> str:
    """Return every fault of a cell."""
    lines = [
        [o.kind, o.fault, o.status, o.first or o.note or _NOTHING, o.cause or _NOTHING]
        for o in found.outcomes
    ]
    headers = ("planted", "where", "status", "first divergence", "cause")
    title = f"{cell.id}: {len(lines)} faults in {found.collectives} collectives a step"
    table = tabulate(_seen(lines), headers=headers, disable_numparse=True)
    return f"{visible(title)}\n{table}"


def _sensitivities(cell: Cell, found: Certificate) -> str:
    """Return the smallest visible error of every gradient."""
    lines = [
        [
            entry.tensor,
            _relative(entry.relative),
            _NOTHING if entry.step is None else str(entry.step),
            _relative(entry.update),
        ]
        for entry in found.sensitivities
    ]
    headers = ("parameter", "gradient from", "in step", "update from")
    title = f"{cell.id}: smallest relative error that would be seen"
    check = found.check
    note = (
        f"\n(checked: {check.seen_above} of {check.of} seen at twice of it, {check.seen_below} at "
        f"half of it)"
        if check
        else ""
    )
    table = tabulate(_seen(lines), headers=headers, disable_numparse=True)
    return f"{visible(title)}\n{table}{note}"


def _summary(cells: Sequence[Cell], certified: Sequence[tuple[Cell, Certificate]]) -> str:
    """Return the closing line."""
    counted = sum(found.counted for _, found in certified)
    caught = sum(found.count(CAUGHT) for _, found in certified)
    named = sum(found.named for _, found in certified)
    missing = len(cells) - len(certified)
    parts = [f"{caught} of {counted} planted faults caught, {named} with the right cause"]
    if missing:
        parts.append(f"{missing} of {len(cells)} cells have no certificate: they do not pass")
    if certified and not counted:
        parts.append("nothing could be planted that changes a number")
    return "; ".join(parts)


def _seen(lines: list[list[str]]) -> list[list[str]]:
    """Return the lines of a table with every character to be seen."""
    return [[visible(text) for text in line] for line in lines]


def _share(count: int, of: int) -> str:
    """Return `count of of (share)`."""
    return f"{count} of {of} ({100 * count / of:.0f} %)" if of else "0 of 0"


def _relative(value: float | None) -> str:
    """Return a relative error with two digits."""
    return _NOTHING if value is None else f"{value:.1e}"
