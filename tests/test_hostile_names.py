"""Whatever a parameter is called, no format obeys it or takes it for its own syntax."""

import json
import re
import unicodedata
from xml.etree import ElementTree

import pytest
from records import failing

from spmd_verify import record as records
from spmd_verify.record import Record
from spmd_verify.reporters import FORMATS, github, terminal

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    "<!-- ]]> &amp; &lt;",
    "a\"b'c",
    "line\nbreak\r\n## heading\x0b\x0c\x85\u2028end",
    "a | b \\| c",
    "`code` ``` fence",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J",
    "\x00\x08\x7f\ufffe\uffff",
    "a\u202eb\u200bc",
    "x" * 300,
    "слой.вес",
    "層.重み",
    "::error file=x::y",
    "%0A::set-output name=a::b",
    "[link](javascript:alert(1)) ![i](http://x) @all #1 ~~s~~ $x$ **b** _i_",
    "=cmd|' /C calc'!A0",
    "",
]
# Formats that are data: their readers get every name as it is.
DATA = {"json", "ctrf"}
# Formats that show a name as it is, without tags.
PLAIN = {"text", *DATA}


def _record(name: str) -> Record:
    """Return a record in which a name stands wherever a name can stand."""
    cell = failing(f"{name}.weight", f"{name}.bias", style=name, case=f"{name}.py", log=name)
    cell.message = f"note of {name}"
    cell.fallbacks = {name: 1}
    assert cell.first_divergence is not None
    cell.first_divergence.located = cell.first_divergence.operator = name
    cell.first_divergence.source = f"{name}:3"
    unknown = {"notes": {"a": ["b"]}, "conditions": {name: "fails"}}
    return Record(tool="spmd-verify 0", cells=[cell], discovered={name: name}, unknown=unknown)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("report_format", FORMATS)
def test_a_hostile_name_is_harmless(report_format: str, name: str) -> None:
    content = FORMATS[report_format](_record(name)).decode()

    allowed = "\n\t"
    assert not [c for c in content if unicodedata.category(c) == "Cc" and c not in allowed] or (
        report_format == "json"
    )
    if report_format not in PLAIN:
        assert "<script>alert(1)" not in content
        assert "<img src=x" not in content


@pytest.mark.parametrize("name", HOSTILE[:-1], ids=range(len(HOSTILE) - 1))
def test_it_adds_no_line_and_no_column(name: str) -> None:
    """But for messages, which may have several lines: those of this record have one."""
    usual, hostile = _record("fc"), _record(name)
    hostile.cells[0].message = usual.cells[0].message
    for report_format in ("text", "md", "github"):
        before = FORMATS[report_format](usual).decode()
        after = FORMATS[report_format](hostile).decode()
        assert len(after.splitlines()) == len(before.splitlines()), report_format
        assert _columns(after) == _columns(before), report_format


def _columns(text: str) -> list[int]:
    """Count the borders of every line of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_it_is_one_property_of_one_command(name: str) -> None:
    for line in github.annotations(_record(name)):
        assert line.splitlines() == [line]
        assert line.isprintable() or "\ufffe" in line
        assert re.match(r"::error (file=[^:,]+,line=\d+,)?title=[^:,]+::", line)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_data_stays_data(name: str) -> None:
    record = _record(name)

    assert records.decode(FORMATS["json"](record)) == record
    root = ElementTree.fromstring(FORMATS["junit"](record))
    keys = [(case.attrib["classname"], case.attrib["name"]) for case in root.iter("testcase")]
    assert len(set(keys)) == len(keys) == 4
    assert len(json.loads(FORMATS["ctrf"](record))["results"]["tests"]) == 4


def test_control_characters_are_made_visible_on_a_terminal() -> None:
    name = "\x1b[31mred\r\n\x07"
    text = terminal.render(_record(name), verbosity=2, explain=True)

    assert "\\x1b[31mred\\r\\n\\x07.weight (gradients, step 0)" in text
    assert text.replace("\n", "").isprintable()


def test_a_message_keeps_its_lines_and_its_tabs() -> None:
    record = _record("fc")
    record.cells[0].message = "a\n\tb\x1b[0m"

    assert "\n  a\n  \tb\\x1b[0m\n" in terminal.render(record)


def test_color_is_ours_alone() -> None:
    text = terminal.render(_record("\x1b[31m"), has_color=True)

    assert re.findall("\x1b[^m]*m", text) == ["\x1b[31m", "\x1b[0m"]
    assert "\x1b[31mmismatch\x1b[0m" in text
