"""What the formats for CI promise their readers: JUnit, CTRF, Markdown, GitHub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import junitparser
import pytest
from records import cell, every_verdict, failing, row

from spmd_verify.exit_codes import decide
from spmd_verify.planting.certificate import Certificate, Outcome, put
from spmd_verify.record import Record
from spmd_verify.reporters import FORMATS, github, md, suites

Element = ElementTree.Element


def _junit(record: Record) -> Element:
    return ElementTree.fromstring(FORMATS["junit"](record))


def _cases(root: Element) -> list[Element]:
    return list(root.iter("testcase"))


def gitlab(root: Element) -> Iterator[tuple[tuple[str, str], str, str | None]]:
    """Read a report as GitLab does: key, status, and the text that is shown.

    Source: gitlab-org/gitlab lib/gitlab/ci/parsers/test/junit.rb: `failure`, else `error`, else
    `skipped`, and of it the text; reports/test_suite.rb keeps one case of a key.
    """
    assert root.tag in ("testsuites", "testsuite")
    for case in _cases(root):
        key = case.attrib["classname"], case.attrib["name"]
        for tag, status in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            found = case.find(tag)
            if found is not None:
                yield key, status, found.text
                break
        else:
            yield key, "success", None


def jenkins(root: Element) -> Iterator[tuple[str, bool, bool, str | None]]:
    """Read a report as Jenkins does: full name, whether it fails or is skipped, what is shown.

    Source: jenkinsci/junit-plugin CaseResult.java: the text of `error`, else of `failure`, makes
    a case fail; `skipped` has a message, or else a text. SuiteResult.java wants a suite's name.
    """
    for suite in root.iter("testsuite"):
        assert suite.attrib["name"]
        for case in suite.iter("testcase"):
            error = case.findtext("error")
            shown = case.findtext("failure") if error is None else error
            skipped = case.find("skipped")
            text = skipped.get("message") or skipped.text if skipped is not None else shown
            name = f"{case.attrib['classname']}.{case.attrib['name']}"
            yield name, shown is not None, skipped is not None, text


def test_gitlab_keeps_every_case_and_shows_why() -> None:
    cases = list(gitlab(_junit(every_verdict())))

    assert len({key for key, _, _ in cases}) == len(cases)
    for _, status, text in cases:
        assert bool(text) == (status != "success")
    shown = {key: text for key, status, text in cases if status == "failed"}
    text = shown["mlp.py.fully_shard [dp=2, float32]", "blocks.0.fc: gradients"]
    assert text is not None
    for words in ("first divergence: step 0, gradients", "worst element [1, 2]", "remedy: divide"):
        assert words in text
    downstream = shown["mlp.py.fully_shard [dp=2, float32]", "blocks.0.fc: parameters"]
    assert "downstream of gradients blocks.0.fc.weight" in (downstream or "")


def test_jenkins_tells_failures_from_skips_and_groups_by_case() -> None:
    cases = list(jenkins(_junit(every_verdict())))

    assert len({name for name, *_ in cases}) == len(cases)
    assert {name.rpartition(" [")[0] for name, fails, _, _ in cases if fails} == {
        f"mlp.py.{style}" for style in ("fully_shard", "ddp", "fsdp2", "zero1")
    }
    assert all(text for _, fails, skipped, text in cases if fails or skipped)
    assert {name.rpartition(" [")[0] for name, _, skipped, _ in cases if skipped} == {
        "mlp.py.default",
        "mlp.py.pp",
    }


def test_junitparser_reads_the_same_counts(tmp_path) -> None:
    path = tmp_path / "junit.xml"
    path.write_bytes(FORMATS["junit"](every_verdict()))
    read = junitparser.JUnitXml.fromfile(str(path))

    assert (read.failures, read.errors, read.skipped) == (4, 1, 3)
    assert read.tests == sum(len(list(suite)) for suite in read) == 12
    assert read.time == pytest.approx(7 * 1.25)
    suite = next(suite for suite in read if "fsdp2" in suite.name)
    (case,) = suite
    (error,) = case.result
    assert isinstance(error, junitparser.Error)
    assert error.message == "rank 1 died"
    assert error.text.splitlines()[1:] == ["rank 1 died", "  File x", "log: /tmp/rank1.log"]


def test_names_have_no_seed_step_run_or_value() -> None:
    """The same check of another run has the same name; repeated values are one check."""
    first = failing(tensors=[row("a.b.w"), row("a.b.w#2", step=1), row("a.b", "module_outputs")])
    second = failing(tensors=[row("a.b.w", step=7, run="anchored"), row("a.b#3", "module_outputs")])
    names = [
        [case.attrib["name"] for case in _cases(_junit(Record(cells=[each])))]
        for each in (first, second)
    ]

    assert names[0] == names[1] == ["a.b: module_outputs", "a.b: gradients", "cell"]


@pytest.mark.parametrize(
    ("name", "stage", "module"),
    [
        ("a.b.weight", "gradients", "a.b"),
        ("weight", "parameters", "model"),
        ("a.weight.exp_avg", "optimizer_state", "a"),
        ("weight.step", "optimizer_state", "model"),
        ("a.b", "module_outputs", "a.b"),
        ("a.b#2", "eval_outputs", "a.b"),
        ("a.w@1", "buffers", "a"),
        ("x.input_ids", "inputs", "model"),
        ("loss", "loss", "model"),
        ("total_norm", "clipping", "model"),
    ],
)
def test_a_row_belongs_to_a_module(name: str, stage: str, module: str) -> None:
    assert suites.module_of(row(name, stage)) == module


def test_two_cells_of_one_name_stay_apart() -> None:
    names = [suite.name for suite in suites.suites(Record(cells=[cell(), cell(), cell()]))]

    assert len(set(names)) == 3


@pytest.mark.parametrize("strict", [False, True])
def test_a_suite_fails_exactly_where_its_cell_does(strict: bool) -> None:
    """Also a cell that fails for none of its rows, and a wrong row that fails no cell."""
    record = every_verdict()
    record.settings["strict"] = strict
    record.cells.append(
        cell("warned", tensors=[row("loss", "loss", "mismatch")], counts={"mismatch": 1})
    )
    for suite in suites.suites(record):
        code = decide([suite.cell], strict=strict)
        assert suite.count(suites.FAILED) > 0 or code != 1
        assert suite.count(suites.FAILED) == 0 or code == 1
        assert (suite.count(suites.BROKEN) > 0) == (code == 3)
    warned = list(_junit(record).iter("testsuite"))[-1]
    assert (warned.find("testcase/system-out") is None) == strict


def test_a_fault_that_survived_fails_the_certificate() -> None:
    found = cell(tensors=[row("fc.weight")])
    fault = {"kind": "drop", "verdict": "", "cause": "", "expected": [], "first": "", "note": ""}
    outcomes = [Outcome(fault="at a", status="survived", **fault)]
    put(found, Certificate(outcomes=outcomes, sensitivities=[], collectives=1))
    (suite,) = suites.suites(Record(cells=[found]))
    (annotation,) = github.annotations(Record(cells=[found]))
    assert annotation.endswith("not every fault that was planted is caught")

    assert [check.name for check in suite.checks if check.status == suites.FAILED] == [
        "certificate"
    ]
    assert "survived: drop: at a" in suite.checks[-1].text


# What of CTRF 0.1 this project writes, from https://ctrf.io/docs/schema: the fields, which of
# them are required, and that there are no others.
_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_STATUS = {"enum": ["passed", "failed", "skipped", "pending", "other"]}


def _object(required: dict[str, object], **optional: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


_SUMMARY = ("tests", "passed", "failed", "skipped", "pending", "other", "start", "stop")
_TEST = _object(
    {"name": _TEXT, "status": _STATUS, "duration": _COUNT},
    suite={"type": "array", "minItems": 1, "items": {"type": "string"}},
    rawStatus={"type": "string"},
    message={"type": "string"},
    trace={"type": "string"},
)
CTRF = _object(
    {
        "reportFormat": {"const": "CTRF"},
        "specVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "results": _object(
            {
                "tool": _object({"name": _TEXT}, version={"type": "string"}),
                "summary": _object(dict.fromkeys(_SUMMARY, _COUNT), suites=_COUNT),
                "tests": {"type": "array", "items": _TEST},
            }
        ),
    },
    generatedBy={"type": "string"},
)


@pytest.mark.parametrize("record", [Record(), every_verdict()], ids=["empty", "all"])
def test_ctrf_is_valid_and_adds_up(record: Record) -> None:
    report = json.loads(FORMATS["ctrf"](record))
    jsonschema.Draft7Validator(CTRF).validate(report)

    summary, tests = report["results"]["summary"], report["results"]["tests"]
    for status in _STATUS["enum"]:
        assert summary[status] == sum(test["status"] == status for test in tests)
    assert summary["tests"] == len(tests) == len(_cases(_junit(record)))
    assert summary["stop"] == sum(test["duration"] for test in tests)
    keys = {(*test["suite"], test["name"]) for test in tests}
    assert len(keys) == len(tests)


def test_the_page_has_every_format(root: Path) -> None:
    page = (root / "docs/reports.md").read_text()

    assert [name for name in FORMATS if f"| `{name}` |" not in page] == []


def _pipes(line: str) -> int:
    """Count the column borders of a Markdown line."""
    return len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))


def test_markdown_has_the_table_why_and_what_differs() -> None:
    text = FORMATS["md"](every_verdict()).decode()

    assert text.startswith("## spmd-verify\n\n3 of 5 cells fail (1 error, 1 unsupported)")
    assert "| fully_shard | dp=2 | mismatch | blocks.0.fc.weight (gradients, step 0) |" in text
    assert "### mlp.py/fully_shard, mesh dp=2, float32: mismatch\n\n<pre>\nfirst div" in text
    assert "| gradients | 0 | blocks.0.fc.weight | mismatch |" in text
    headings = re.findall("^### mlp.py/([a-z0-9_]+)", text, re.MULTILINE)
    assert headings == ["fully_shard", "ddp", "fsdp2", "zero1", "default", "pp"]


def test_a_long_table_of_tensors_says_what_it_leaves_out() -> None:
    names = [f"layer{at}.weight" for at in range(md.MOST_ROWS + 5)]
    text = FORMATS["md"](Record(cells=[failing(*names)])).decode()

    assert f"{md.MOST_ROWS + 6} tensors that differ, the first {md.MOST_ROWS}" in text
    assert text.count("| gradients | 0 | layer") == md.MOST_ROWS


def _commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Read workflow commands as a runner does.

    Source: actions/runner ActionCommand.cs, and its documentation of the escapes.
    """
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"::(\w+) ?(.*?)::(.*)", line)
        assert match, line
        pairs = [pair.partition("=") for pair in match[2].split(",") if pair]
        properties = {name: _unescaped(value, ":,") for name, _, value in pairs}
        found.append((match[1], properties, _unescaped(match[3])))
    return found


def _unescaped(text: str, more: str = "") -> str:
    for mark in f"\r\n{more}%":
        text = text.replace(f"%{ord(mark):02X}", mark)
    return text


def test_annotations_stand_at_the_line_that_differs_first() -> None:
    found = failing(case="a,b%:c.py:Net")
    assert found.first_divergence is not None
    ((kind, place, message),) = _commands("\n".join(github.annotations(Record(cells=[found]))))
    assert (kind, place) == (
        "error",
        {"file": "a,b%:c.py", "line": "1", "title": "mismatch: fully_shard"},
    )
    assert "cause: factor: blocks.0.fc.weight is 2.000 x\nremedy: divide" in message

    found.first_divergence.source = "net.py:22"
    ((_, place, _),) = _commands("\n".join(github.annotations(Record(cells=[found]))))
    assert (place["file"], place["line"]) == ("net.py", "22")
    ((_, place, _),) = _commands(
        "\n".join(github.annotations(Record(cells=[failing(case="hf:gpt2")])))
    )
    assert "file" not in place


def test_the_limits_of_github_hold_with_five_thousand_failing_tensors() -> None:
    names = [f"layer{at}.{'x' * 300}.weight" for at in range(5000)]
    big = failing(*names)
    for at, each in enumerate(big.tensors[:5000]):
        each.ratio = 10.0 + at
    record = Record(cells=[cell(), big, failing(style="other")])

    told = _commands("\n".join(github.annotations(record)))
    assert len(told) == github.MOST_ANNOTATIONS == 10
    assert [place["title"] for _, place, _ in told[:2]] == [
        "mismatch: fully_shard",
        "mismatch: other",
    ]
    assert [f"gradients, layer{at}." in told[5001 - at][2] for at in (4999, 4998)] == [True, True]
    assert told[-1][2] == "4992 more tensors fail: see the report"

    summary = FORMATS["github"](record)
    assert len(summary) <= 1024 * 1024


def test_a_summary_over_the_limit_is_cut_at_lines_and_says_so() -> None:
    many = [failing(f"layer{at}.{'x' * 9000}", style=f"style{at}") for at in range(100)]
    many += [cell(f"more{at}", message="y" * 3000) for at in range(300)]
    whole, cut = FORMATS["md"](Record(cells=many)), FORMATS["github"](Record(cells=many))

    assert len(whole) > 1024 * 1024 >= len(cut)
    text = cut.decode()
    assert re.search(r"\n\.\.\. and \d+ more notes, left out here\n", text) or re.search(
        r"\n\d+ parts of this report left out: GitHub takes 1 MiB\n", text
    )
    assert text.count("<pre>") == text.count("</pre>")
    assert text.count("<details>") == text.count("</details>")
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert {_pipes(line) for line in tables} <= {8, 9}


def test_the_summary_of_a_large_table_keeps_its_first_lines() -> None:
    cells = [cell(f"style{at}", mesh="dp=2," * 2000) for at in range(200)]
    text = FORMATS["github"](Record(cells=cells)).decode()

    assert "| style0 |" in text
    left_out = re.search(r"\.\.\. and (\d+) more cells, left out here", text)
    assert left_out is not None
    assert text.count("| style") + int(left_out[1]) - 1 == 200


def test_what_the_log_shows_is_no_command() -> None:
    text = "::set-env name=A::b\nfirst\n::error::not ours"
    lines = github.stdout(Record(cells=[failing()]), text).splitlines()
    word = lines[0].removeprefix("::stop-commands::")

    assert lines[1:4] == text.splitlines()
    assert lines[4] == f"::{word}::"
    assert word not in text
    assert len(lines) == 6
    assert lines[5].startswith("::error file=mlp.py,")


def test_nothing_that_passes_is_annotated() -> None:
    quiet = [each for each in every_verdict().cells if each.verdict in ("rounding", "unsupported")]

    assert github.annotations(Record(cells=quiet)) == []
    assert len(github.annotations(every_verdict())) == 4


def test_the_worst_cell_comes_first() -> None:
    worse = failing(style="worse")
    assert worse.worst is not None
    worse.worst.ratio = float("nan")
    told = github.annotations(Record(cells=[*every_verdict().cells, worse]))

    titles = [place["title"] for _, place, _ in _commands("\n".join(told))]
    assert titles[:3] == ["error: fsdp2", "mismatch: worse", "mismatch: fully_shard"]
