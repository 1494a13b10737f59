"""`spmd-verify compare A B`: two dumps, or two records. Imports torch only for dumps."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from spmd_verify import record_changes
from spmd_verify.errors import UsageError
from spmd_verify.exit_codes import decide
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.record import Record, read
from spmd_verify.reporters import terminal
from spmd_verify.streams import wants_color
from spmd_verify.verdict import LIMITS
from spmd_verify.version import __version__


def compare(arguments: argparse.Namespace, command: Sequence[str]) -> tuple[Record, str]:
    """Compare what a command line names.

    Args:
        arguments: Of the verb `compare`.
        command: The words typed, for the record.

    Returns:
        The record with its exit code, and the report as text.

    Raises:
        UsageError: `compare-kinds`, and what dumps and records raise.
    """
    kinds = [_is_record(path) for path in (arguments.reference, arguments.candidate)]
    if kinds[0] != kinds[1]:
        names = ["a record" if kind else "a dump" for kind in kinds]
        raise UsageError(
            f"Cannot compare these: {arguments.reference} and {arguments.candidate}. Got "
            f"{names[0]} and {names[1]}, expected two dumps or two records. A record ends in .json",
            slug="compare-kinds",
        )
    if kinds[0]:
        return _compare_records(arguments, command)
    return _compare_dumps(arguments, command)


def _is_record(path: str) -> bool:
    """Say whether a path names a record; its content is read later."""
    return path.endswith(".json")


def _compare_records(arguments: argparse.Namespace, command: Sequence[str]) -> tuple[Record, str]:
    """Compare two records cell by cell; the result holds the newer one's cells."""
    before, after = read(arguments.reference), read(arguments.candidate)
    found = record_changes.changes(before, after, strict=bool(arguments.strict))
    code = record_changes.exit_code(found)
    record = _record(arguments, command)
    record.cells = [change.after for change in found if change.after is not None]
    record.unknown["changes"] = [
        {"kind": change.kind, "text": change.text, "is_regression": change.is_regression}
        for change in found
    ]
    record.exit_code = 0 if code == 1 and arguments.exit_zero else code
    return record, record_changes.render(before, after, found)


def _compare_dumps(arguments: argparse.Namespace, command: Sequence[str]) -> tuple[Record, str]:
    """Judge one dump by another; the result has one cell."""
    from spmd_verify.dumps.inference import read_any, read_layout_file
    from spmd_verify.dumps.judging import Comparison, judge_dumps

    started = time.perf_counter()
    axes = _axes(arguments.axes)
    comparison = Comparison(
        reference=read_any(arguments.reference, axes),
        candidate=read_any(arguments.candidate, axes),
        exact=None if arguments.exact is None else read_any(arguments.exact, axes),
        noise=[read_any(path, axes) for path in arguments.noise],
        layouts={} if arguments.layout is None else read_layout_file(arguments.layout),
    )
    cell = judge_dumps(comparison)
    cell.duration_seconds = time.perf_counter() - started
    record = _record(arguments, command)
    record.cells = [cell]
    record.exit_code = decide(
        record.cells, strict=bool(arguments.strict), exit_zero=arguments.exit_zero
    )
    verbosity = -1 if arguments.quiet else arguments.verbose
    has_color = wants_color(arguments.color, sys.stdout)
    return record, terminal.render(record, verbosity=verbosity, has_color=has_color)


def _axes(text: str | None) -> dict[str, int] | None:
    """Read `--axes`."""
    if text is None:
        return None
    mesh = parse_mesh(text)
    return {name or "dp": size for name, size in mesh.axes}


def _record(arguments: argparse.Namespace, command: Sequence[str]) -> Record:
    """Return a record with how it was made and no cells."""
    return Record(
        tool=f"spmd-verify {__version__}",
        command=list(command),
        settings={
            "reference": arguments.reference,
            "candidate": arguments.candidate,
            "exact": arguments.exact,
            "noise": list(arguments.noise),
            "layout": arguments.layout,
            "axes": arguments.axes,
            "strict": bool(arguments.strict),
            "limits": {f"{dtype}/{norm}": c for (dtype, norm), c in LIMITS.items()},
        },
    )
