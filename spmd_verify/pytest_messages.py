"""What the pytest plugin says of a cell: like an assertion, in plain text. Torch-free."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from spmd_verify.record import Cause, Cell, Record, Row
from spmd_verify.reporters.paragraphs import first_row


def command(words: Sequence[str]) -> str:
    """Return the command line that runs something alone."""
    return shlex.join(["spmd-verify", *words])


def failed(cell: Cell, record: Record, alone: str) -> str:
    """Return why a cell fails and what to do, one fact a line.

    Args:
        cell: It fails.
        record: It is of.
        alone: The command line that runs it alone.
    """
    return "\n".join(_lines(cell, record, alone))


def nothing_run(said: str, alone: str) -> str:
    """Return why the checker gave no verdict.

    Args:
        said: What it printed on stderr.
        alone: The command line to repeat it.
    """
    return f"{said or 'spmd-verify ended without a word'}\n  run it alone: {alone}"


def undetermined(cell: Cell) -> str:
    """Return what a warning says of a cell that cannot be decided."""
    reason = cell.undetermined_reason or cell.message or "rounding alone decides its values"
    return f"{named(cell)} is undetermined: {' '.join(reason.split())}"


def named(cell: Cell) -> str:
    """Return what a cell is called: `ddp on dp=2, float32`."""
    return f"{cell.style} on {cell.mesh}, {cell.dtype}"


def _lines(cell: Cell, record: Record, alone: str) -> Iterator[str]:
    """Give the lines of a failure."""
    what = {
        "mismatch": "does not compute what one device computes",
        "semantic": "computes per rank what it promises, and one device computes something else",
        "not_exercised": "had nothing to compare: no gradient and no change",
        "undetermined": "cannot be decided (strict)",
        "error": "a rank failed",
    }
    says = what.get(cell.verdict, "has rows that fail under strict")
    yield f"{cell.case}: {named(cell)}: {cell.verdict}: {says}"
    first = cell.first_divergence
    row = first_row(cell)
    if first is not None:
        yield f"  first tensor that differs: {first.tensor} ({first.stage}, step {first.step})"
        if row is not None:
            yield from _numbers(row, record)
        if first.operator:
            source = f" at {first.source}" if first.source else ""
            yield f"  operator: {first.operator}{source}"
        if first.located:
            yield f"  located: {first.located}"
    cause = (row.cause if row is not None else None) or cell.cause
    if cause is not None:
        yield from _cause(cause)
    elif cell.message or cell.undetermined_reason:
        reason = cell.undetermined_reason or cell.message
        yield from (f"  {line}" for line in reason.splitlines())
    if cell.log and cell.verdict == "error":
        yield f"  log: {cell.log}"
    yield f"  run it alone: {alone}"


def _numbers(row: Row, record: Record) -> Iterator[str]:
    """Give the worst element and the error of a row."""
    if row.worst is not None:
        at = ", ".join(map(str, row.worst.index))
        yield (
            f"  worst element [{at}]: {row.worst.actual!r} under the style, "
            f"{row.worst.expected!r} on one device"
        )
    ranks = f", ranks {', '.join(map(str, row.ranks))}" if row.ranks else ""
    if row.ratio is not None and math.isfinite(row.ratio):
        limits = record.settings.get("limits", {})
        allowed = limits.get(f"{row.dtype}/tensor")
        limit = f" ({allowed:g} x is allowed)" if allowed is not None else ""
        yield f"  error: {row.ratio:.3g} x the noise of this tensor{limit}{ranks}"
    elif ranks:
        yield f"  on{ranks[1:]}"


def _cause(cause: Cause) -> Iterator[str]:
    """Give what is known of why."""
    yield f"  cause: {cause.kind}: {cause.text}"
    factor = f"{cause.factor:.6g}" if cause.factor is not None else ""
    known = {"factor": factor, "axis": cause.axis or ""}
    if any(known.values()):
        yield "  " + ", ".join(f"{name}: {value}" for name, value in known.items() if value)
    if cause.remedy:
        yield f"  remedy: {cause.remedy}"
