"""The JSON report: the record itself."""

from spmd_verify.record import Record, encode


def render(record: Record) -> bytes:
    """Return the record as JSON."""
    return encode(record)
