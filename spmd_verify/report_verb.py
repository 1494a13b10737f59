"""`spmd-verify report RECORD`: every report of a record that is on disk. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spmd_verify.errors import RecordError
from spmd_verify.planting import certificate
from spmd_verify.record import ExactInfo, Record, read
from spmd_verify.reporters import FORMATS


class _RecordExtras(msgspec.Struct):
    """What reports read of a record's `unknown`."""

    conditions: dict[str, str] = {}
    exact: dict[str, ExactInfo] = {}
    notes: dict[str, list[str]] = {}
    changes: list[dict[str, Any]] = []
    gate: list[str] = []


class _CellExtras(msgspec.Struct):
    """What reports read of a cell's `unknown`."""

    probe: dict[str, Any] = {}
    not_run: list[str] = []
    certificate: certificate.Certificate | None = None


def read_record(path: str) -> Record:
    """Read a record, with everything in it that a report shows.

    Raises:
        UsageError: `record-unreadable`.
        RecordError: `not-a-record`, `record-too-new`.
    """
    found = read(path)
    try:
        msgspec.convert(found.unknown, _RecordExtras)
        for cell in found.cells:
            msgspec.convert(cell.unknown, _CellExtras)
    except msgspec.ValidationError as error:
        raise RecordError(
            f"Not a record of spmd-verify: {path}. Got {error}. Pass the file that --report "
            f"json=PATH wrote",
            slug="not-a-record",
        ) from error
    return found


def rendered(found: Record, reports: Sequence[tuple[str, str]]) -> list[tuple[str, bytes]]:
    """Return path and content of every report; all are made before one is written.

    Args:
        found: What to show.
        reports: `(format, path)`, checked.
    """
    return [(path, FORMATS[report_format](found)) for report_format, path in reports]
