"""Which cells make a run fail: verdicts, settings by cell, and waivers. Torch-free.

The command line loads this for `--help`: the record is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from spmd_verify.errors import UsageError, choices_text
from spmd_verify.exit_codes import FAILING, has_doubtful_rows
from spmd_verify.visible import visible

if TYPE_CHECKING:
    from spmd_verify.record import Cell

DEFAULT_FAIL_ON: Final = tuple(sorted(FAILING))
# `error` may be named but always fails: a cell whose rank died was not judged.
MAY_FAIL: Final = (
    "mismatch", "semantic", "not_exercised", "undetermined", "rounding", "unsupported", "error"
)  # fmt: skip
MAY_BE_WAIVED: Final = MAY_FAIL[:-1]
# A project's other waivers, which a run of one case does not need, are named up to this many.
_MOST_NAMED: Final = 3
WAIVER_KEYS: Final = ("cells", "reason", "until", "verdict", "kind")


@dataclass(frozen=True)
class Waiver:
    """Cells that may fail for a reason that is known.

    Attributes:
        cells: Globs over `CASE/STYLE` and `CASE/STYLE MESH DTYPE`.
        reason: Why they may.
        until: Last day on which they may; None for no end.
        verdict: The only verdict that may be; None for any.
        kind: The only kind of cause that may be; None for any.
        what: `waiver` or `known failure`, for what is said of it.
    """

    cells: tuple[str, ...]
    reason: str
    until: date | None = None
    verdict: str | None = None
    kind: str | None = None
    what: str = "waiver"

    @property
    def text(self) -> str:
        """Return it in one line, without its reason."""
        only = " ".join(word for word in (self.verdict, self.kind) if word)
        return f"{self.what} of {', '.join(self.cells)}{f' ({only})' if only else ''}"

    def is_over(self, today: date) -> bool:
        """Say whether its last day has passed."""
        return self.until is not None and self.until < today

    def covers(self, cell: Cell, suffix: str = "") -> bool:
        """Say whether it is about what this cell says, its date aside."""
        kind = cell.cause.kind if cell.cause is not None else None
        return (
            cell.verdict != "error"
            and matches(cell, self.cells, suffix)
            and self.verdict in (None, cell.verdict)
            and self.kind in (None, kind)
        )


@dataclass(frozen=True)
class Override:
    """Settings of some cells; None leaves the general one."""

    cells: tuple[str, ...]
    fail_on: tuple[str, ...] | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class GateRules:
    """What decides whether a cell fails.

    Attributes:
        fail_on: Verdicts that fail; `error` always does.
        strict: Whether undetermined and unexercised rows fail too.
        overrides: In the file's order; of those that match a cell, the last one decides,
            setting by setting.
        waivers: The first one that covers a cell and is not over lets it pass.
        suffix: What the names of this run's cells end in; see `suffix_of`.
    """

    fail_on: tuple[str, ...] = DEFAULT_FAIL_ON
    strict: bool = False
    overrides: tuple[Override, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    suffix: str = ""

    def is_failing(self, cell: Cell) -> bool:
        """Say whether a cell fails, waivers aside."""
        fail_on, strict = self.fail_on, self.strict
        for override in self.overrides:
            if matches(cell, override.cells, self.suffix):
                fail_on = fail_on if override.fail_on is None else override.fail_on
                strict = strict if override.strict is None else override.strict
        is_named = cell.verdict == "error" or cell.verdict in fail_on
        return is_named or (strict and has_doubtful_rows(cell))

    def judge(self, cell: Cell, today: date | None = None) -> None:
        """Write into a cell whether it fails, in place."""
        from spmd_verify.record import Gate  # msgspec, not for --help

        day = date.today() if today is None else today
        if not self.is_failing(cell):
            cell.gate = Gate(fails=False)
            return
        holding = (waiver for waiver in self.waivers if not waiver.is_over(day))
        waiver = next((each for each in holding if each.covers(cell, self.suffix)), None)
        if waiver is None:
            cell.gate = Gate(fails=True)
        else:
            until = None if waiver.until is None else waiver.until.isoformat()
            cell.gate = Gate(fails=False, waived=waiver.reason, until=until)

    def said(self, cells: Sequence[Cell], today: date | None = None) -> list[str]:
        """Return what is to be said of waived cells, and of waivers that are over or unused."""
        day = date.today() if today is None else today
        lines = [_waived(cell, self.suffix) for cell in cells if cell.gate and cell.gate.waived]
        elsewhere = []
        for waiver in self.waivers:
            near = [cell for cell in cells if matches(cell, waiver.cells, self.suffix)]
            if not near and not waiver.is_over(day):
                elsewhere.append(waiver.text)
            else:
                lines += self._of(waiver, near, day)
        if elsewhere:
            more = f" and {len(elsewhere) - _MOST_NAMED} more" * (len(elsewhere) > _MOST_NAMED)
            named = "; ".join(elsewhere[:_MOST_NAMED])
            lines.append(f"note: no cell of this run is meant by: {named}{more}")
        return [visible(line) for line in lines]

    def _of(self, waiver: Waiver, near: Sequence[Cell], day: date) -> list[str]:
        """Say of one waiver that it is over, or that no cell needs it any more."""
        needing = [cell for cell in near if self._is_needy(cell)]
        covered = [cell for cell in needing if waiver.covers(cell, self.suffix)]
        if waiver.is_over(day):
            number = "1 cell fails" if len(covered) == 1 else f"{len(covered)} cells fail"
            failing = f"; {number} for it" if covered else "; nothing needs it"
            return [f"warning: over since {waiver.until}: {waiver.text}: {waiver.reason}{failing}"]
        judged = [cell for cell in near if cell.verdict not in ("error", "unsupported")]
        if covered or (not judged and not needing):
            return []
        if needing:
            return [f"warning: {waiver.text} does not cover what fails now: {waiver.reason}"]
        return [f"warning: fixed, remove it: {waiver.text}: nothing fails: {waiver.reason}"]

    def _is_needy(self, cell: Cell) -> bool:
        """Say whether a cell fails but for waivers; its own gate knows best."""
        if cell.gate is not None:
            return cell.gate.fails or cell.gate.waived is not None
        return self.is_failing(cell)


def matches(cell: Cell, globs: Iterable[str], suffix: str = "") -> bool:
    """Say whether a cell is meant: by `CASE/STYLE`, or with mesh, dtype and variants."""
    names = (cell.id, full_name(cell, suffix))
    return any(name == glob or fnmatchcase(name, glob) for glob in globs for name in names)


def full_name(cell: Cell, suffix: str = "") -> str:
    """Return the name that baselines have for a cell."""
    return f"{cell.id} {cell.mesh} {cell.dtype}{suffix}"


def suffix_of(settings: Mapping[str, Any]) -> str:
    """Return what tells a run's cells from those of other variants, ` accumulate=2`.

    Args:
        settings: Those of a record.
    """
    overrides = settings.get("overrides")
    given = dict(overrides) if isinstance(overrides, Mapping) else {}
    if settings.get("resume_check"):
        given["resume_check"] = "yes"
    return "".join(f" {key}={value}" for key, value in sorted(given.items()))


def check_fail_on(words: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the verdicts of `--fail-on`.

    Raises:
        UsageError: `unknown-verdict`.
    """
    for word in words:
        if word not in MAY_FAIL:
            raise UsageError(
                f"Unknown verdict: {where} {word!r}; {choices_text(word, MAY_FAIL)}",
                slug="unknown-verdict",
            )
    return tuple(words)


def waiver_from(
    plain: object, where: str, *, what: str = "waiver", cells_key: str = "cells"
) -> Waiver:
    """Read a waiver of pyproject.toml, or a known failure of a baseline.

    Args:
        plain: What stands there.
        where: For messages.
        what: See `Waiver.what`; a known failure needs a date.
        cells_key: Under which key the globs are.

    Raises:
        UsageError: `bad-waiver`, `unknown-setting`.
    """
    keys = (cells_key, *WAIVER_KEYS[1:])
    if not isinstance(plain, Mapping):
        raise _bad(where, what, f"{plain!r}", f"a table with {', '.join(keys)}")
    for key in plain:
        if key not in keys:
            raise UsageError(
                f"Unknown setting: {where}. Got {key!r} in a {what}; {choices_text(key, keys)}",
                slug="unknown-setting",
            )
    globs = globs_from(plain.get(cells_key))
    if not globs:
        raise _bad(where, what, f"{cells_key} = {plain.get(cells_key)!r}", "globs over cells")
    reason = plain.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise _bad(where, what, f"reason = {reason!r}", "why these cells may fail")
    until = _date(plain.get("until"), where, what)
    if until is None and what != "waiver":
        raise _bad(where, what, "no until", "the last day it holds, '2027-01-31'")
    verdict, kind = plain.get("verdict"), plain.get("kind")
    if verdict is not None and verdict not in MAY_BE_WAIVED:
        raise _bad(where, what, f"verdict = {verdict!r}", f"one of {', '.join(MAY_BE_WAIVED)}")
    if kind is not None and not isinstance(kind, str):
        raise _bad(where, what, f"kind = {kind!r}", "a kind of cause (docs/causes.md)")
    return Waiver(globs, " ".join(reason.split()), until, verdict, kind, what)


def globs_from(value: object) -> tuple[str, ...]:
    """Return one glob or a list of them as a tuple; empty where it is neither."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) for one in found):
        return ()
    return tuple(one for one in found if one.strip())


def _date(value: object, where: str, what: str) -> date | None:
    """Read a date of TOML or JSON; None where there is none."""
    if value is None or type(value) is date:
        return value
    try:
        return date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError as error:
        raise _bad(where, what, f"until = {value!r}", "a date such as '2027-01-31'") from error


def _bad(where: str, what: str, got: str, expected: str) -> UsageError:
    return UsageError(
        f"Cannot read a {what}: {where}. Got {got}, expected {expected}. Correct it, or remove "
        f"the {what}",
        slug="bad-waiver",
    )


def _waived(cell: Cell, suffix: str) -> str:
    """Say that a cell fails and may."""
    assert cell.gate is not None
    because = f" ({cell.cause.kind})" if cell.cause is not None else ""
    until = f" (until {cell.gate.until})" if cell.gate.until else ""
    name = full_name(cell, suffix)
    return f"waived: {name}: {cell.verdict}{because}: {cell.gate.waived}{until}"
