"""The exit codes, as the README has them, decided in one place. Torch-free."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the command line needs the numbers for --help, not the record
    from spmd_verify.record import Cell

PASSED: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
RANK_FAILED: Final = 3
INTERNAL: Final = 4
NOTHING_JUDGED: Final = 5
INTERRUPTED: Final = 130

FAILING: Final = frozenset({"mismatch", "semantic", "not_exercised"})
STRICT_ROWS: Final = ("undetermined", "not_exercised", "mismatch")


def fails(cell: "Cell", *, strict: bool = False) -> bool:
    """Say whether a cell counts as failed; one whose ranks failed (`error`) is not judged.

    What the run's gate said of the cell decides, waivers included; else its verdict. Under
    `strict` a cell also fails for an undetermined, unexercised or mismatching row that did not
    fail the cell by itself.
    """
    if cell.verdict == "error":
        return False
    if cell.gate is not None:
        return cell.gate.fails
    return cell.verdict in FAILING or (strict and has_doubtful_rows(cell))


def has_doubtful_rows(cell: "Cell") -> bool:
    """Say whether a cell fails under `strict` alone."""
    if cell.verdict in ("unsupported", "error"):
        return False
    return cell.verdict == "undetermined" or any(cell.counts.get(word) for word in STRICT_ROWS)


def decide_certified(cells: "Iterable[Cell]", *, strict: bool, exit_zero: bool) -> int:
    """Return the exit code of `certify`: `decide`'s, and 1 where a cell is not certified."""
    from spmd_verify.planting import certificate  # msgspec, not for --help

    found = list(cells)
    code = decide(found, strict=strict, exit_zero=exit_zero)
    judged = [cell for cell in found if cell.verdict not in ("error", "unsupported")]
    if code == PASSED and any(certificate.is_open(cell) for cell in judged):
        return PASSED if exit_zero else FAILED
    return code


def decide(cells: "Iterable[Cell]", *, strict: bool = False, exit_zero: bool = False) -> int:
    """Return the exit code of a finished run: the first of 3, 1, 5, 0 that applies.

    `exit_zero` turns 1 into 0 and nothing else.
    """
    found = list(cells)
    if any(cell.verdict == "error" for cell in found):
        return RANK_FAILED
    if any(fails(cell, strict=strict) for cell in found):
        return PASSED if exit_zero else FAILED
    if all(cell.verdict == "unsupported" for cell in found):
        return NOTHING_JUDGED
    return PASSED
