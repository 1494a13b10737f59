"""Reports: views of a record, none of which computes anything. Torch-free."""

from collections.abc import Callable
from typing import Final

from spmd_verify.record import Record
from spmd_verify.reporters import ctrf, github, junit, md, text
from spmd_verify.reporters import html as html_report
from spmd_verify.reporters import json as json_report
from spmd_verify.whole_file import write_whole

# One format a line; `--report FORMAT=PATH` takes these.
FORMATS: Final[dict[str, Callable[[Record], bytes]]] = {
    "text": text.render,
    "json": json_report.render,
    "html": html_report.render,
    "junit": junit.render,
    "md": md.render,
    "github": github.render,
    "ctrf": ctrf.render,
}


def write_report(record: Record, report_format: str, path: str) -> None:
    """Write one report whole or not at all; `-` is stdout.

    Raises:
        UsageError: `report-not-written`.
    """
    write_content(FORMATS[report_format](record), path)


def write_content(content: bytes, path: str) -> None:
    """Write what a report renders to; see `write_report`."""
    if path == "-":
        print(content.decode(), end="", flush=True)
    else:
        write_whole(path, content)
