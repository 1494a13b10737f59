"""Every format says in words which cells a waiver lets pass, why and how long, and what is over."""

import json
from datetime import date
from xml.etree import ElementTree

import pytest
from records import cell, failing, row

from spmd_verify.gate import GateRules, Waiver
from spmd_verify.record import Record
from spmd_verify.reporters import FORMATS, github, suites

TODAY = date(2026, 12, 1)
WHY = "waived until 2026-12-24: issue 12"
OVER = "over since 2026-11-30: waiver of */ddp: soon fixed; 1 cell fails for it"
FIXED = "fixed, remove it: waiver of */replicate: nothing fails: old"


def _record() -> Record:
    """Return a cell that is waived, one whose waiver is over, and one that needs none any more."""
    rules = GateRules(
        waivers=(
            Waiver(("*/fully_shard",), "issue 12", date(2026, 12, 24)),
            Waiver(("*/ddp",), "soon fixed", date(2026, 11, 30)),
            Waiver(("*/replicate",), "old"),
        )
    )
    cells = [failing(), failing(style="ddp"), cell(tensors=[row("fc.weight")])]
    for each in cells:
        rules.judge(each, TODAY)
    return Record(cells=cells, exit_code=1, unknown={"gate": rules.said(cells, TODAY)})


@pytest.mark.parametrize("report_format", ["text", "md", "github", "html", "junit", "ctrf"])
def test_the_reason_and_the_date_stand_in_every_format(report_format: str) -> None:
    text = FORMATS[report_format](_record()).decode().replace("\\", "")

    for words in ("issue 12", "2026-12-24", OVER, FIXED):
        assert words in text, words


@pytest.mark.parametrize("report_format", ["md", "github"])
def test_markdown_has_a_paragraph_for_a_waived_cell(report_format: str) -> None:
    text = FORMATS[report_format](_record()).decode()

    assert "| fully_shard | dp=2 | mismatch, waived |" in text
    assert f"### mlp.py/fully_shard, mesh dp=2, float32: mismatch, waived\n\n<pre>\n{WHY}\n" in text
    assert "| ddp | dp=2 | mismatch | " in text
    assert text.index("### Waivers and baseline") < text.index("### mlp.py/ddp")


def test_a_waived_check_is_skipped_with_its_reason_and_an_expired_one_fails() -> None:
    root = ElementTree.fromstring(FORMATS["junit"](_record()))
    by_suite = {suite.attrib["name"]: suite for suite in root.iter("testsuite")}
    waived = by_suite["mlp.py.fully_shard [dp=2, float32]"]
    skipped = [case.find("skipped") for case in waived if case.find("skipped") is not None]

    assert waived.attrib["failures"] == "0"
    assert len(skipped) == 2
    assert all(each.attrib["message"].startswith(WHY) for each in skipped)
    assert all((each.text or "").startswith(WHY) for each in skipped)
    assert "first divergence: step 0, gradients" in (skipped[0].text or "")
    assert by_suite["mlp.py.ddp [dp=2, float32]"].attrib["failures"] == "2"
    warned = by_suite["spmd-verify.gate"].find("testcase/skipped")
    assert warned is not None
    assert (warned.text or "").splitlines() == [f"warning: {OVER}", f"warning: {FIXED}"]


def test_ctrf_says_the_same_of_the_same_checks() -> None:
    tests = json.loads(FORMATS["ctrf"](_record()))["results"]["tests"]
    told = [test["message"] for test in tests if test["status"] == "skipped"]

    assert [message.partition(";")[0] for message in told] == [
        WHY, WHY, f"warning: {OVER.partition(';')[0]}"
    ]  # fmt: skip


def test_a_waived_cell_without_tensors_is_told_too() -> None:
    found = cell("ddp", "not_exercised", message="no gradient carried a signal")
    GateRules(waivers=(Waiver(("*",), "frozen"),)).judge(found, TODAY)
    (check,) = suites.suites(Record(cells=[found]))[0].checks

    assert (check.status, check.message) == (suites.SKIPPED, "waived: frozen")
    assert check.text[1:] == ("waived: frozen", "no gradient carried a signal")


def test_annotations_are_errors_warnings_and_notices() -> None:
    told = github.annotations(_record())

    kinds = [line.split(" ")[0] for line in told]
    assert kinds == ["::error", "::warning", "::warning", "::notice"]
    assert told[1] == f"::warning title=spmd-verify::{OVER}"
    assert told[-1].endswith(f"mismatch%0A{WHY}")


def test_many_notices_are_cut_and_counted() -> None:
    found = [failing(style=f"style{at}") for at in range(25)]
    for each in found:
        GateRules(waivers=(Waiver(("*",), "known"),)).judge(each, TODAY)
    told = github.annotations(Record(cells=found))

    assert len(told) == github.MOST_ANNOTATIONS
    assert told[-1] == "::notice title=spmd-verify::16 more waived cells: see the report"


def test_what_is_worse_than_the_baseline_is_a_failing_check() -> None:
    """A cell that passes and made the run exit with 1; one that fails is told by its own suite."""
    changes = [
        {"kind": "changed", "name": "mlp.py/replicate dp=2 float32", "text": "more collectives",
         "is_regression": True},
        {"kind": "regressed", "name": "mlp.py/fully_shard dp=2 float32", "text": "rounding ->",
         "is_regression": True},
        {"kind": "gone", "name": "mlp.py/tp tp=2 float32", "text": "was exact",
         "is_regression": False},
    ]  # fmt: skip
    record = Record(
        cells=[cell(), failing()], exit_code=1, unknown={"baseline": {"changes": changes}}
    )
    gate = suites.suites(record)[-1]

    assert [(check.name, check.status) for check in gate.checks] == [
        ("baseline: mlp.py/replicate dp=2 float32", suites.FAILED)
    ]
    told = github.annotations(record)
    assert told[1].endswith("mlp.py/replicate dp=2 float32: changed: more collectives")
    assert len(told) == 2


@pytest.mark.parametrize("found", [5, "x", {"changes": 7}, {"changes": [3, {}]}, [1], None])
@pytest.mark.parametrize("key", ["gate", "baseline"])
def test_what_another_program_left_there_does_no_harm(key: str, found: object) -> None:
    record = Record(cells=[cell()], unknown={key: found})

    for render in FORMATS.values():
        assert render(record)
