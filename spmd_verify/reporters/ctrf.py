"""The CTRF report (https://ctrf.io, Common Test Report Format 0.1). Torch-free."""

from typing import Any, Final

import msgspec

from spmd_verify.record import Record
from spmd_verify.reporters.suites import BROKEN, FAILED, PASSED, SKIPPED, Check, Suite, suites
from spmd_verify.visible import visible

_SPEC_VERSION: Final = "0.1.0"
# An error is a failure there; `rawStatus` keeps the record's word.
_STATUS: Final = {PASSED: "passed", FAILED: "failed", BROKEN: "failed", SKIPPED: "skipped"}


def render(record: Record) -> bytes:
    """Return the record as CTRF: a test per module and stage of a cell."""
    found = suites(record)
    tests = [_test(suite, check) for suite in found for check in suite.checks]
    counts = {
        status: sum(test["status"] == status for test in tests)
        for status in ("passed", "failed", "skipped", "pending", "other")
    }
    name, _, version = record.tool.partition(" ")
    tool = {"name": visible(name) or "spmd-verify"}
    duration = _milliseconds(sum(suite.seconds for suite in found))
    report = {
        "reportFormat": "CTRF",
        "specVersion": _SPEC_VERSION,
        "generatedBy": visible(record.tool) or "spmd-verify",
        "results": {
            "tool": {**tool, "version": visible(version)} if version else tool,
            # A record has no time of day, and the format wants one.
            "summary": {
                "tests": len(tests),
                **counts,
                "suites": len(found),
                "start": 0,
                "stop": duration,
            },
            "tests": tests,
        },
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def _test(suite: Suite, check: Check) -> dict[str, Any]:
    """Return one check; a cell's time stands at its first one."""
    is_first = check is suite.checks[0]
    test = {
        "name": check.name,
        "status": _STATUS[check.status],
        "duration": _milliseconds(suite.seconds) if is_first else 0,
        "suite": [suite.name],
        "rawStatus": visible(check.verdict),
    }
    if check.message:
        test["message"] = check.message
    if check.text:
        test["trace"] = "\n".join(check.text)
    return test


def _milliseconds(seconds: float) -> int:
    """Return whole milliseconds."""
    return round(1000 * seconds)
