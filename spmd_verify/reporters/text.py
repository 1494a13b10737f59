"""The text report: what `run` and `certify` print, made from their record. Torch-free."""

import spmd_verify.reporters.certificates as certificates
import spmd_verify.reporters.terminal as terminal
from spmd_verify.record import Record
from spmd_verify.reporters.paragraphs import is_certified
from spmd_verify.visible import visible


def render(record: Record) -> bytes:
    """Return the report as text, without color."""
    return (shown(record) + "\n").encode(errors="backslashreplace")


def shown(
    record: Record, *, verbosity: int = 0, explain: bool = False, has_color: bool = False
) -> str:
    """Return the report that fits what a record is of, without a final newline.

    Args:
        record: A finished record.
        verbosity: See `terminal.render` and `certificates.render`.
        explain: Put first what discovery found.
        has_color: Color the verdicts.
    """
    if is_certified(record):
        return certificates.render(record, verbosity=verbosity)
    text = terminal.render(record, verbosity=verbosity, explain=explain, has_color=has_color)
    changes = [visible(str(change.get("text"))) for change in record.unknown.get("changes", ())]
    return "\n\n".join(["\n".join(changes), text]) if changes else text
