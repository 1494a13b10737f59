"""What runs found over time: JSON lines, one a run. Torch-free."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from spmd_verify.baselines.baseline import environment_of, states
from spmd_verify.errors import RecordError
from spmd_verify.gate import full_name, suffix_of
from spmd_verify.plain_structs import from_plain, to_plain
from spmd_verify.record import Record
from spmd_verify.whole_file import write_whole

# 1: first version.
HISTORY_VERSION: Final = 1
_WHOLE: Final = re.compile(r"[0-9]{1,6}")
_GIT_SECONDS: Final = 10.0


class Point(msgspec.Struct, kw_only=True):
    """One cell in one run."""

    verdict: str
    fails: bool = False
    cause: str | None = None
    ratio: float | None = None
    seconds: float | None = None
    unknown: dict[str, Any] = {}


class Entry(msgspec.Struct, kw_only=True):
    """One run: a line of the file.

    Attributes:
        history_version: Major version of the format.
        date: When the line was written, UTC, ISO 8601.
        commit: Of the folder's git repository; None without one.
        environment: As in baselines.
        exit_code: The run's.
        cells: By full name.
    """

    history_version: int = HISTORY_VERSION
    date: str = ""
    commit: str | None = None
    tool: str = ""
    environment: str = ""
    exit_code: int = 0
    cells: dict[str, Point] = {}
    unknown: dict[str, Any] = {}


def entry_of(record: Record, now: datetime | None = None, commit: str | None = None) -> Entry:
    """Return the line of a record."""
    suffix = suffix_of(record.settings)
    seconds = {full_name(cell, suffix): cell.duration_seconds for cell in record.cells}
    cells = {
        name: Point(
            verdict=state.verdict,
            fails=state.fails,
            cause=state.cause,
            ratio=state.ratio,
            seconds=round(seconds[name], 2) or None,
        )
        for name, state in states(record).items()
    }
    return Entry(
        date=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        commit=commit,
        tool=record.tool,
        environment=environment_of(record),
        exit_code=record.exit_code,
        cells=cells,
    )


def current_commit() -> str | None:
    """Return the commit of the current folder, with `+` where tracked files differ from it."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(
            words, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def read(path: str) -> list[Entry]:
    """Return the runs of a file, oldest first.

    Raises:
        RecordError: `history-unreadable`, `not-a-history`, `history-too-new`.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise RecordError(
            f"Cannot read the history: {path}. Got {error.strerror}. Append a run first: "
            f"spmd-verify baseline history {path} record.json",
            slug="history-unreadable",
        ) from error
    return [_entry(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def append(path: str, entries: list[Entry]) -> list[Entry]:
    """Add runs to a file, which may be new, and return all of it.

    A kill leaves the old file.

    Raises:
        RecordError: As `read`; the file is left as it is.
        UsageError: `report-not-written`.
    """
    exists = Path(path).exists()
    before = read(path) if exists else []
    old = Path(path).read_bytes() if exists else b""
    if old and not old.endswith(b"\n"):
        old += b"\n"
    write_whole(path, old + b"".join(_line(entry) for entry in entries))
    return before + entries


def _line(entry: Entry) -> bytes:
    return (json.dumps(to_plain(entry), ensure_ascii=True) + "\n").encode()


def _entry(line: bytes, where: str) -> Entry:
    """Read one line."""
    try:
        plain = msgspec.json.decode(line)
        version = str(plain["history_version"])
        if _WHOLE.fullmatch(version) is None:
            raise TypeError(f"history_version {version[:40]!r}")
        if int(version) > HISTORY_VERSION:
            raise RecordError(
                f"The history is too new: {where}. Got version {version}, this spmd-verify reads "
                f"up to {HISTORY_VERSION}. Install the one that wrote it, or a newer one",
                slug="history-too-new",
            )
        found: Entry = from_plain(Entry, plain)
    except (msgspec.DecodeError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(
            f"Not a history of spmd-verify: {where}. Got {type(error).__name__}: {error}. Remove "
            f"the line, or name another file; nothing was changed",
            slug="not-a-history",
        ) from error
    return found
