"""A run beside its baseline: what got worse or better, what is new, gone or known. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Final

from spmd_verify.baselines.baseline import Baseline, State, environment_of, states
from spmd_verify.exit_codes import FAILED, PASSED, RANK_FAILED
from spmd_verify.gate import GateRules, full_name, suffix_of
from spmd_verify.record import Cell, Record
from spmd_verify.visible import visible

REGRESSED: Final = "regressed"
IMPROVED: Final = "improved"
CHANGED: Final = "changed"
NEW: Final = "new"
GONE: Final = "gone"
STILL: Final = "failing"
KNOWN: Final = "known"
KINDS: Final = (REGRESSED, IMPROVED, CHANGED, NEW, GONE, STILL, KNOWN)
# How much is known of a cell that does not fail; less of it is a regression.
_PASSING_RANK: Final[Mapping[str, int]] = {"exact": 0, "rounding": 0, "undetermined": 1}
_NOT_JUDGED: Final = 2
# A run of some styles leaves out the others, which are named up to this many.
_MOST_GONE: Final = 3
# A line of the comparison quotes so much of a reason; the run's own report has all of it.
_MOST_SIGNS: Final = 200
_FAILING: Final = 3


@dataclass(frozen=True)
class Change:
    """One cell that is not as it was, or fails as it did.

    Attributes:
        kind: One of `KINDS`.
        name: The cell's full name.
        text: What changed.
        is_regression: Whether it fails the comparison.
        is_error: Whether a rank failed in it.
    """

    kind: str
    name: str
    text: str
    is_regression: bool = False
    is_error: bool = False

    @property
    def line(self) -> str:
        """Return one line."""
        mark = "  REGRESSION" if self.is_regression and self.kind != REGRESSED else ""
        return visible(f"{self.kind:<9}  {self.name}: {self.text}{mark}")


@dataclass(frozen=True)
class Comparison:
    """A run beside its baseline.

    Attributes:
        environment: Which of the baseline's it was compared with; None: it has none that fits.
        changes: In the record's order, what is gone last.
        num_cells: Of the record.
        warnings: What was skipped and why; known failures that are over or fixed.
    """

    environment: str | None
    changes: tuple[Change, ...]
    num_cells: int
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Return 3 where a regression is an `error`, 1 for another one, else 0."""
        worse = [change for change in self.changes if change.is_regression]
        if any(change.is_error for change in worse):
            return RANK_FAILED
        return FAILED if worse else PASSED

    def lines(self, path: str) -> list[str]:
        """Return the report: warnings, changes, a summary."""
        gone = [c for c in self.changes if c.kind == GONE and not c.is_regression]
        is_many = len(gone) > _MOST_GONE
        shown = [c for c in self.changes if not (is_many and c in gone)]
        found = [*self.warnings, *(change.line for change in shown)]
        if is_many:
            named = ", ".join(change.name for change in gone[:_MOST_GONE])
            more = len(gone) - _MOST_GONE
            found.append(visible(f"{GONE:<9}  {named} and {more} more, not in this run"))
        if self.environment is not None:
            counts = Counter(change.kind for change in self.changes)
            told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
            found.append(
                visible(
                    f"baseline {path} ({self.environment}): {self.num_cells} cells, "
                    f"{told or 'all as before'}"
                )
            )
        return found


def compare(
    baseline: Baseline,
    record: Record,
    path: str,
    *,
    strict: bool = False,
    environment: str | None = None,
    today: date | None = None,
) -> Comparison:
    """Compare a run with a baseline.

    Args:
        baseline: As read from `path`.
        record: The run.
        path: For messages.
        strict: Whether every change that is not for the better is a regression.
        environment: Which of the baseline's environments; None for the record's own.
        today: For known failures.
    """
    own = environment_of(record)
    wanted = environment or own
    rules = GateRules(waivers=baseline.waivers(path), suffix=suffix_of(record.settings))
    known = [line for line in rules.said(record.cells, today) if line.startswith("warning")]
    if wanted not in baseline.environments:
        return Comparison(None, (), len(record.cells), (_other(baseline, path, wanted), *known))
    before, after = baseline.environments[wanted], states(record)
    cells = {full_name(cell, rules.suffix): cell for cell in record.cells}
    changes = []
    for name, state in after.items():
        change = _known(name, state, cells[name], rules, today or date.today())
        if change is None:
            change = _change(name, before.get(name), state, cells[name], is_strict=strict)
        if change is not None:
            changes.append(change)
    changes += [
        Change(GONE, name, f"was {before[name].verdict}", is_regression=strict)
        for name in gone(before, record)
    ]
    return Comparison(wanted, tuple(changes), len(record.cells), tuple(known))


def _known(name: str, state: State, cell: Cell, rules: GateRules, today: date) -> Change | None:
    """Return the line of a cell that fails and may; None for another one."""
    if not state.fails or state.verdict == "error":
        return None
    reason = cell.gate.waived if cell.gate is not None else None
    for waiver in rules.waivers:
        if reason is None and waiver.covers(cell, rules.suffix) and not waiver.is_over(today):
            reason = f"{waiver.reason} (until {waiver.until})"
    return None if reason is None else Change(KNOWN, name, f"{state.verdict}: {reason}")


def gone(before: Mapping[str, State], record: Record) -> list[str]:
    """Return the names of a baseline that a record should have: of its cases and variants."""
    suffix, present = suffix_of(record.settings), states(record)
    own = {cell.case for cell in record.cells}
    return [
        name
        for name in before
        if name not in present and (split := _split(name)) is not None
        and split[0] in own and split[1] == suffix
    ]  # fmt: skip


def _split(name: str) -> tuple[str, str] | None:
    """Return case and suffix of a full name `CASE/STYLE MESH DTYPE SUFFIX`.

    The style, the mesh and the dtype hold no space and the style no slash; a case may hold both.
    """
    head, slash, tail = name.rpartition("/")
    words = tail.split(" ")
    if not slash or len(words) < 3:
        return None
    return head, "".join(f" {word}" for word in words[3:])


def _other(baseline: Baseline, path: str, wanted: str) -> str:
    """Say that a baseline has nothing for an environment."""
    known = "; ".join(sorted(baseline.environments)) or "nothing"
    return visible(
        f"warning: skipped: {path} has no cells for {wanted}. It has {known}. Save this "
        f"environment's too, or compare with another one: spmd-verify baseline compare RECORD "
        f"{path} --environment NAME"
    )


def _change(
    name: str, before: State | None, after: State, cell: Cell, *, is_strict: bool
) -> Change | None:
    """Judge one cell; None where it passes as it did."""
    is_error = after.verdict == "error"
    if before is None:
        text = f"{after.verdict}{_because(cell)}"
        return Change(NEW, name, text, is_regression=after.fails, is_error=is_error)
    moved = f"{before.verdict} -> {after.verdict}"
    was, now = _rank(before), _rank(after)
    if now > was or (is_error and before.verdict != "error"):
        return Change(REGRESSED, name, f"{moved}{_because(cell)}", True, is_error)
    if now < was:
        return Change(IMPROVED, name, moved)
    if after.fails:
        if (before.verdict, before.cause) != (after.verdict, after.cause):
            text = f"fails otherwise: {moved}, {before.cause} -> {after.cause}{_because(cell)}"
            return Change(REGRESSED, name, text, True, is_error)
        return Change(STILL, name, f"{after.verdict}{_because(cell)}")
    told = _differences(before, after)
    if not told:
        return None
    return Change(CHANGED, name, "; ".join(told), is_regression=is_strict)


def _rank(state: State) -> int:
    """Return how far a cell is from passing."""
    return _FAILING if state.fails else _PASSING_RANK.get(state.verdict, _NOT_JUDGED)


def _differences(before: State, after: State) -> list[str]:
    """Return what else is not as it was in a cell that passes."""
    told = []
    if before.verdict != after.verdict:
        told.append(f"{before.verdict} -> {after.verdict}")
    if before.layout_digest != after.layout_digest:
        told.append(_counts("layouts", before.layouts, after.layouts))
    if before.collectives != after.collectives:
        told.append(_counts("collectives", before.collectives, after.collectives))
    nearer = sorted(set(after.near) - set(before.near), key=lambda name: -after.near[name])
    if nearer:
        most = f"{nearer[0]} {after.near[nearer[0]]:g}"
        told.append(f"{len(nearer)} more tensors above half of the limit, most {most} x the noise")
    return told


def _counts(what: str, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return which counts moved."""
    moved = [
        f"{key} {before.get(key, 0)} -> {after.get(key, 0)}"
        for key in sorted({*before, *after})
        if before.get(key, 0) != after.get(key, 0)
    ]
    return f"{what}: {', '.join(moved) or 'the same counts on other tensors'}"


def _because(cell: Cell) -> str:
    """Return the cause of a cell that fails, or why it has no verdict; else nothing."""
    if cell.cause is not None:
        reason = f"{cell.cause.kind}: {cell.cause.text}"
    elif cell.verdict in ("exact", "rounding"):
        return ""
    else:
        reason = cell.skipped_reason or cell.undetermined_reason or cell.message
    left = len(reason) - _MOST_SIGNS
    cut = f"{reason[:_MOST_SIGNS]} ... {left} more characters" if left > 0 else reason
    return f" ({cut})" if reason else ""
