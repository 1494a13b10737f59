"""The JUnit report, for GitLab, Jenkins and every other reader of that format. Torch-free.

Both know a test by `classname` and `name` together and drop a second one of the same name.
GitLab shows the text of `failure`, `error` and `skipped`, GitHub's readers their `message`.
"""

import io
from typing import Final
from xml.etree import ElementTree

from spmd_verify.record import Record
from spmd_verify.reporters.escaping import xml_name, xml_text
from spmd_verify.reporters.suites import BROKEN, FAILED, SKIPPED, Check, Suite, suites

_TAGS: Final = {FAILED: "failure", BROKEN: "error", SKIPPED: "skipped"}
_TOOL: Final = "spmd-verify"


def render(record: Record) -> bytes:
    """Return the record as JUnit XML: a suite per cell, a case per module and stage."""
    found = suites(record)
    root = ElementTree.Element("testsuites", {"name": _TOOL, **_counts(found)})
    for suite in found:
        root.append(_suite(suite))
    ElementTree.indent(root)
    stream = io.BytesIO()
    ElementTree.ElementTree(root).write(stream, encoding="utf-8", xml_declaration=True)
    return stream.getvalue() + b"\n"


def _suite(suite: Suite) -> ElementTree.Element:
    """Return one cell."""
    name = xml_name(suite.name)
    element = ElementTree.Element("testsuite", {"name": name, **_counts([suite])})
    seconds = f"{suite.seconds:.3f}"
    for check in suite.checks:
        names = {"classname": name, "name": xml_name(check.name)}
        case = ElementTree.SubElement(element, "testcase", names)
        # A cell takes its time as a whole; readers that add cases up must not count it twice.
        case.set("time", seconds if check is suite.checks[0] else "0.000")
        _outcome(case, check)
    return element


def _outcome(case: ElementTree.Element, check: Check) -> None:
    """Put into a case why it did not pass, or what it warns of."""
    tag = _TAGS.get(check.status)
    text = xml_text("\n".join(check.text))
    if tag is not None:
        told = ElementTree.SubElement(case, tag, message=xml_name(check.message))
        if tag != "skipped":
            told.set("type", xml_name(check.verdict))
        told.text = text or xml_text(check.message)
    elif text:
        ElementTree.SubElement(case, "system-out").text = text


def _counts(found: list[Suite]) -> dict[str, str]:
    """Return the attributes that add suites up."""
    seconds = sum(suite.seconds for suite in found)
    return {
        "tests": str(sum(len(suite.checks) for suite in found)),
        "failures": str(sum(suite.count(FAILED) for suite in found)),
        "errors": str(sum(suite.count(BROKEN) for suite in found)),
        "skipped": str(sum(suite.count(SKIPPED) for suite in found)),
        "time": f"{seconds:.3f}",
    }
