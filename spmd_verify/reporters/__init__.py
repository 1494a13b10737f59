"""Reports: views of a record, none of which computes anything. Torch-free."""

import os
import tempfile
from pathlib import Path

from spmd_verify.errors import UsageError
from spmd_verify.record import Record
from spmd_verify.reporters import json as json_report

FORMATS = {"json": json_report.render}


def write_report(record: Record, report_format: str, path: str) -> None:
    """Write one report whole or not at all; `-` is stdout.

    Raises:
        UsageError: `report-not-written`.
    """
    content = FORMATS[report_format](record)
    if path == "-":
        print(content.decode(), end="", flush=True)
        return
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _not_written(path, error) from error


def _not_written(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"Cannot write the report: {path!r}. Got {error.strerror}. Name a file in a folder that "
        f"exists and can be written",
        slug="report-not-written",
    )
