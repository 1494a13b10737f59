"""Two records, cell by cell: what is new, gone or changed, and what got worse. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from spmd_verify.exit_codes import FAILED, PASSED, RANK_FAILED, fails, has_doubtful_rows
from spmd_verify.record import Cell, Record

CellKey = tuple[str, str, str, str]
NEW: Final = "new"
GONE: Final = "gone"
CHANGED: Final = "changed"


class Change:
    """One cell that is not as it was.

    Attributes:
        kind: `new`, `gone` or `changed`.
        before: In the first record, if there.
        after: In the second record, if there.
        is_regression: It fails now and did not before; under `strict` also what is gone.
    """

    def __init__(self, before: Cell | None, after: Cell | None, *, strict: bool) -> None:
        """Judge one pair of cells, of which one may be absent."""
        self.before, self.after = before, after
        self.kind = NEW if before is None else GONE if after is None else CHANGED
        was_failing = before is not None and _is_failing(before, strict=strict)
        is_failing = after is not None and _is_failing(after, strict=strict)
        self.is_regression = (is_failing and not was_failing) or (after is None and strict)

    @property
    def text(self) -> str:
        """Return one line."""
        cell = self.after or self.before
        assert cell is not None
        was = self.before.verdict if self.before is not None else "-"
        now = self.after.verdict if self.after is not None else "-"
        mark = "  REGRESSION" if self.is_regression else ""
        cause = self.after.cause if self.after is not None else None
        because = f" ({cause.kind}: {cause.text})" if cause is not None and mark else ""
        return f"{self.kind:<7}  {name_of(cell)}: {was} -> {now}{mark}{because}"


def changes(before: Record, after: Record, *, strict: bool = False) -> list[Change]:
    """Return the cells whose verdict or first divergence is not as it was, in `after`'s order.

    Args:
        before: The record that was accepted.
        after: The newer one.
        strict: See `Change.is_regression`.
    """
    known = {key_of(cell): cell for cell in before.cells}
    current = {key_of(cell): cell for cell in after.cells}
    found = [
        Change(known.get(key), cell, strict=strict)
        for key, cell in current.items()
        if key not in known or _state(known[key]) != _state(cell)
    ]
    found += [
        Change(cell, None, strict=strict) for key, cell in known.items() if key not in current
    ]
    return found


def exit_code(found: Sequence[Change]) -> int:
    """Return 3 where a regression is an `error`, 1 for another one, else 0."""
    worse = [change for change in found if change.is_regression]
    if any(change.after is not None and change.after.verdict == "error" for change in worse):
        return RANK_FAILED
    return FAILED if worse else PASSED


def render(before: Record, after: Record, found: Sequence[Change]) -> str:
    """Return the report as text without a final newline."""
    counts = {kind: sum(change.kind == kind for change in found) for kind in (NEW, GONE, CHANGED)}
    worse = sum(change.is_regression for change in found)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    summary = (
        f"{len(after.cells)} cells, {len(before.cells)} before: {told}; "
        f"{worse} regression{'' if worse == 1 else 's'}"
    )
    return "\n".join([*(change.text for change in found), summary])


def _is_failing(cell: Cell, *, strict: bool) -> bool:
    """Say whether a cell is one that a run exits with 1 or 3 for."""
    is_waived = cell.gate is not None and cell.gate.waived is not None
    is_doubtful = strict and not is_waived and has_doubtful_rows(cell)
    return cell.verdict == "error" or fails(cell, strict=strict) or is_doubtful


def key_of(cell: Cell) -> CellKey:
    """Return what makes a cell the same in two records."""
    return cell.case, cell.style, cell.mesh, cell.dtype


def _state(cell: Cell) -> tuple[str, object]:
    """Return what of a cell counts as a change."""
    first = cell.first_divergence
    return cell.verdict, None if first is None else (first.step, first.stage, first.tensor)


def name_of(cell: Cell) -> str:
    """Return a cell's name with its mesh and dtype."""
    return f"{cell.id} {cell.mesh} {cell.dtype}"
