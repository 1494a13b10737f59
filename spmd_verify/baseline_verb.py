"""`spmd-verify baseline save|compare|accept|list|history`. Torch-free."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from datetime import date
from fnmatch import fnmatchcase

from tabulate import tabulate

from spmd_verify.baselines import baseline as baselines
from spmd_verify.baselines import history
from spmd_verify.baselines.baseline import Baseline, State, environment_of, states
from spmd_verify.baselines.changes import compare, gone
from spmd_verify.errors import RecordError, UsageError
from spmd_verify.exit_codes import FAILED, PASSED
from spmd_verify.gate import waiver_from
from spmd_verify.plain_structs import to_plain
from spmd_verify.record import Record, read
from spmd_verify.reporters import trend
from spmd_verify.version import __version__
from spmd_verify.visible import visible
from spmd_verify.whole_file import write_whole

Say = Callable[[str], None]


def run(arguments: argparse.Namespace, say: Say, environment: Mapping[str, str]) -> int:
    """Do what a command line asks, say what was found, and return the exit code.

    Args:
        arguments: Of the verb `baseline`.
        say: Prints a text.
        environment: `os.environ`: `accept` asks it for `CI`.

    Raises:
        UsageError: `baseline-exists`, `accept-in-ci`, `record-empty` and what files raise;
            nothing was written.
    """
    if arguments.action == "list":
        return _list(arguments, say)
    if arguments.action == "history":
        return _history(arguments, say)
    record = _judged(arguments.record)
    if arguments.action == "save":
        return _save(record, arguments.file, say)
    if arguments.action == "accept":
        return _accept(record, arguments, say, environment)
    found = compare(
        baselines.read(arguments.file),
        record,
        arguments.file,
        strict=bool(arguments.strict),
        environment=arguments.environment,
    )
    say("\n".join(found.lines(arguments.file)))
    is_forgiven = found.exit_code == FAILED and arguments.exit_zero
    return PASSED if is_forgiven else found.exit_code


def _judged(path: str) -> Record:
    """Read a record that has cells.

    Raises:
        RecordError: `record-empty`, and those of records.
    """
    record = read(path)
    if not record.cells:
        raise RecordError(
            f"The record has no cells: {path}. Got none, expected at least one. Nothing was judged "
            f"in that run: see what it printed, run it again",
            slug="record-empty",
        )
    return record


def _save(record: Record, path: str, say: Say) -> int:
    """Add the cells of a record to a baseline, which may be new; change none that it has."""
    kept = _read_or_new(path)
    name, found = environment_of(record), states(record)
    cells = kept.environments.setdefault(name, {})
    differing = [
        cell for cell, state in found.items() if to_plain(cells.get(cell, state)) != to_plain(state)
    ]
    if differing:
        raise UsageError(
            f"The baseline has other states of these cells: {path}. Got {len(differing)}, the "
            f"first is {visible(differing[0])!r}. See and take them: spmd-verify baseline "
            f"accept RECORD {path}",
            slug="baseline-exists",
        )
    added = len(set(found) - set(cells))
    cells.update(found)
    _write(kept, path)
    failing = [cell for cell, state in found.items() if state.fails]
    lines = [f"saved {added} new cells of {len(found)} for {name} in {path}"]
    lines += [visible(f"note: {cell} fails: {found[cell].verdict}") for cell in failing]
    if failing:
        lines.append(f"let them fail: spmd-verify baseline accept RECORD {path} --reason TEXT "
            f"--until DATE")  # fmt: skip
    say("\n".join(lines))
    return PASSED


def _accept(
    record: Record, arguments: argparse.Namespace, say: Say, environment: Mapping[str, str]
) -> int:
    """Show what differs, then make the record's cells the baseline's."""
    path, kept = arguments.file, _read_or_new(arguments.file)
    name = environment_of(record)
    found = {cell: s for cell, s in states(record).items() if _is_meant(cell, arguments.match)}
    kept.environments.setdefault(name, {})
    say("\n".join(compare(kept, record, path).lines(path)))
    known = _known(kept, found, arguments)
    if environment.get("CI") and not arguments.yes:
        raise UsageError(
            f"Not accepted: {path}. CI is set, where nobody has looked at the difference above. "
            f"Accept it where you work and commit the file, or pass --yes",
            slug="accept-in-ci",
        )
    cells = kept.environments[name]
    for cell in gone(cells, record):
        if _is_meant(cell, arguments.match):
            del cells[cell]
    cells.update(found)
    kept.known_failures = known
    _write(kept, path)
    say(f"accepted {len(found)} cells for {name} in {path}, {len(known)} known failures")
    return PASSED


def _known(
    kept: Baseline, found: Mapping[str, State], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Return the known failures: the old ones that still fail, and those that are given now.

    Raises:
        UsageError: `bad-waiver`.
    """
    given: dict[str, dict[str, object]] = {}
    if arguments.reason is not None or arguments.until is not None:
        plain = {"cell": arguments.match or "*", "reason": arguments.reason,
            "until": arguments.until}  # fmt: skip
        told = waiver_from(plain, "--reason and --until", what=baselines.KNOWN, cells_key="cell")
        assert told.until is not None
        for name, state in found.items():
            may = state.fails and state.verdict != "error"
            if may:
                given[name] = dict(baselines.known_failure(name, state, told.reason, told.until))
    fixed = {name for name, state in found.items() if not state.fails}
    old = [one for one in kept.known_failures if one["cell"] not in fixed | set(given)]
    return [*old, *given.values()]


def _is_meant(name: str, glob: str | None) -> bool:
    """Say whether `-k` means a cell, by `CASE/STYLE` or by its full name."""
    head, _, tail = name.rpartition("/")
    names = (name, f"{head}/{tail.split(' ')[0]}")
    return glob is None or any(each == glob or fnmatchcase(each, glob) for each in names)


def _list(arguments: argparse.Namespace, say: Say) -> int:
    """Print what a baseline holds."""
    kept = baselines.read(arguments.file)
    blocks = []
    for environment, cells in sorted(kept.environments.items()):
        lines = [
            [visible(name), state.verdict, _number(state.ratio), visible(state.cause or "-")]
            for name, state in sorted(cells.items())
        ]
        headers = ("cell", "verdict", "error / noise", "cause")
        table = tabulate(lines, headers=headers, disable_numparse=True)
        blocks.append(f"{visible(environment)}\n{table}")
    for waiver in kept.waivers(arguments.file):
        over = "OVER since" if waiver.is_over(date.today()) else "until"
        blocks.append(visible(f"{waiver.text}: {waiver.reason} ({over} {waiver.until})"))
    say("\n\n".join(blocks) or "no cells")
    return PASSED


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _history(arguments: argparse.Namespace, say: Say) -> int:
    """Append runs to a history, write its page, print its end."""
    commit = history.current_commit() if arguments.records else None
    added = [history.entry_of(read(path), commit=commit) for path in arguments.records]
    path = arguments.file
    entries = history.append(path, added) if added else history.read(path)
    if arguments.page is not None:
        is_html = arguments.page.endswith((".html", ".htm"))
        write_whole(arguments.page, trend.render(entries, is_html=is_html))
    lines = [
        f"{entry.date}  {entry.commit or '-'}  {entry.environment}  {len(entry.cells)} cells, "
        f"{sum(point.fails for point in entry.cells.values())} failing"
        for entry in entries
    ]
    say("\n".join(visible(line) for line in lines) or "no runs")
    return PASSED


def _read_or_new(path: str) -> Baseline:
    """Read a baseline; an empty one where there is no file."""
    return baselines.read(path) if os.path.lexists(path) else Baseline()


def _write(kept: Baseline, path: str) -> None:
    kept.tool = f"spmd-verify {__version__}"
    baselines.write(kept, path)
