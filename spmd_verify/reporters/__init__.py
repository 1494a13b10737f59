"""Reports: views of a record, none of which computes anything. Torch-free."""

from spmd_verify.record import Record
from spmd_verify.reporters import html as html_report
from spmd_verify.reporters import json as json_report
from spmd_verify.whole_file import write_whole

FORMATS = {
    "json": json_report.render,
    "html": html_report.render,
}


def write_report(record: Record, report_format: str, path: str) -> None:
    """Write one report whole or not at all; `-` is stdout.

    Raises:
        UsageError: `report-not-written`.
    """
    content = FORMATS[report_format](record)
    if path == "-":
        print(content.decode(), end="", flush=True)
    else:
        write_whole(path, content)
