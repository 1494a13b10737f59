"""Baselines, known failures and histories: what is said, what fails, and what is never lost."""

from __future__ import annotations

import html.parser
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_verify import cli
from spmd_verify.baselines import baseline as baselines
from spmd_verify.earlier import HASHES, Earlier
from spmd_verify.errors import UsageError
from spmd_verify.record import Cause, Cell, Record, Row, WorstTensor, decode, encode

Run = Callable[..., tuple[int, str]]
ENVIRONMENT = {"torch": "2.13.0+cpu", "machine": "x86_64", "cpu_capability": "AVX2"}
NAME = "torch 2.13, gloo, x86_64 AVX2"


def cell(style: str, verdict: str, **fields: Any) -> Cell:
    given: dict[str, Any] = {"case": "m.py", "mesh": "dp=2", "dtype": "float32"}
    given |= {"world_size": 2, "runner": "processes", **fields}
    return Cell(style=style, verdict=verdict, **given)


def row(name: str, ratio: float, layout: str = "R") -> Row:
    return Row(name=name, stage="gradients", step=0, verdict="rounding", ratio=ratio, error=ratio,
        noise=1.0, layout=layout)  # fmt: skip


def factor(text: str = "2 x") -> Cause:
    return Cause(kind="factor", text=text)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `baseline` in an empty folder without CI; return exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)

    def call(*words: str) -> tuple[int, str]:
        code = cli.main(["baseline", *words])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return call


def put(name: str, *cells: Cell, **fields: Any) -> str:
    """Write a record into the current folder."""
    given: dict[str, Any] = {"environment": ENVIRONMENT, "tool": "spmd-verify 0", **fields}
    Path(name).write_bytes(encode(Record(cells=list(cells), **given)))
    return name


def test_it_keeps_verdicts_ratios_and_fingerprints_and_no_values(run: Run) -> None:
    rows = [row("a", 0.5), row("b", 2.718281828, "S(0)")]
    worst = WorstTensor(tensor="b", stage="gradients", step=0, error=1.23456, noise=1, ratio=2.7183)
    kept = cell("ddp", "rounding", tensors=rows, worst=worst, collectives={"all_reduce": 3})
    assert run("save", put("r.json", kept), "b.json")[0] == 0

    text = Path("b.json").read_text()
    state = json.loads(text)["environments"][NAME]["m.py/ddp dp=2 float32"]
    assert state["near"] == {"gradients b": 2.72}
    assert state["layouts"] == {"R": 1, "S(0)": 1}
    assert (state["ratio"], state["collectives"]) == (2.72, {"all_reduce": 3})
    assert "1.23456" not in text
    assert run("compare", "r.json", "b.json")[0] == 0
    assert "m.py/ddp dp=2 float32  rounding" in run("list", "b.json")[1]


def test_regressions_improvements_new_and_gone_are_told_apart(run: Run) -> None:
    before = [
        cell("breaks", "rounding"),
        cell("heals", "mismatch", cause=factor()),
        cell("shifts", "mismatch", cause=factor()),
        cell("fails", "mismatch", cause=factor()),
        cell("refuses", "exact"),
        cell("moves", "exact", tensors=[row("a", 0.1)], collectives={"all_reduce": 1}),
        cell("stays", "exact"),
        cell("goes", "exact"),
        cell("elsewhere", "exact", case="other.py"),
    ]
    after = [
        cell("breaks", "mismatch", cause=factor("4 x the reference")),
        cell("heals", "rounding"),
        cell("shifts", "mismatch", cause=Cause(kind="missing_reduction", text="not summed")),
        cell("fails", "mismatch", cause=factor()),
        cell("refuses", "unsupported", skipped_reason="no such layer"),
        cell("moves", "exact", tensors=[row("a", 3.0, "S(0)")], collectives={"all_gather": 2}),
        cell("stays", "exact"),
        cell("comes", "exact"),
        cell("arrives", "mismatch", cause=factor()),
    ]
    run("save", put("r.json", *before), "b.json")
    code, out = run("compare", put("s.json", *after), "b.json")
    told = {line.split("m.py/")[1].split()[0]: line for line in out.splitlines() if "m.py/" in line}
    kinds = {name: line.split()[0] for name, line in told.items()}

    assert code == 1
    assert kinds == {
        "breaks": "regressed", "heals": "improved", "shifts": "regressed", "fails": "failing",
        "refuses": "regressed", "moves": "changed", "comes": "new", "arrives": "new",
        "goes": "gone",
    }  # fmt: skip
    assert "rounding -> mismatch (factor: 4 x the reference)" in told["breaks"]
    assert "exact -> unsupported (no such layer)" in told["refuses"]
    for part in ("layouts: R 1 -> 0, S(0) 0 -> 1", "all_gather 0 -> 2", "most gradients a 3 x"):
        assert part in told["moves"]
    assert told["arrives"].endswith("REGRESSION")
    assert "9 cells, 3 regressed, 1 improved, 1 changed, 2 new, 1 gone, 1 failing" in out
    assert run("compare", "s.json", "b.json", "--exit-zero")[0] == 0

    moves = [c for c in after if c.style in ("moves", "stays")]
    moves += [cell(name, "exact") for name in ("breaks", "refuses", "goes")]
    moves += [cell("heals", "exact"), *(c for c in before if c.style in ("shifts", "fails"))]
    assert run("compare", put("t.json", *moves), "b.json")[0] == 0
    assert run("compare", "t.json", "b.json", "--strict")[0] == 1
    died = [*moves[1:], cell("moves", "error", message="rank 1 died")]
    code, out = run("compare", put("u.json", *died), "b.json")
    assert code == 3
    assert "exact -> error (rank 1 died)" in out


def test_another_environment_is_a_warning_and_a_skip_unless_asked(run: Run) -> None:
    run("save", put("r.json", cell("ddp", "exact")), "b.json")
    newer = {**ENVIRONMENT, "torch": "2.14.0"}
    put("s.json", cell("ddp", "mismatch", cause=factor()), environment=newer)

    code, out = run("compare", "s.json", "b.json")
    assert code == 0
    assert "skipped: b.json has no cells for torch 2.14, gloo, x86_64 AVX2. It has " + NAME in out
    assert run("compare", "s.json", "b.json", "--environment", NAME)[0] == 1
    assert run("save", "s.json", "b.json")[0] == 0
    assert set(json.loads(Path("b.json").read_text())["environments"]) == {
        NAME, "torch 2.14, gloo, x86_64 AVX2"
    }  # fmt: skip


def test_a_run_of_one_style_names_few_of_those_it_left_out(run: Run) -> None:
    run("save", put("r.json", *(cell(name, "exact") for name in "abcdefg")), "b.json")
    code, out = run("compare", put("s.json", cell("a", "exact")), "b.json")

    assert code == 0
    assert out.count("gone") == 2
    assert "m.py/d dp=2 float32 and 3 more, not in this run" in out
    assert run("compare", "s.json", "b.json", "--strict")[1].count("REGRESSION") == 6


def test_variants_are_cells_of_their_own(run: Run) -> None:
    run("save", put("r.json", cell("ddp", "exact")), "b.json")
    wrong = cell("ddp", "rounding", tensors=[row("a", 1.0)])
    put("s.json", wrong, settings={"overrides": {"accumulate": "2"}})

    code, out = run("compare", "s.json", "b.json")
    assert (code, out.split()[0]) == (0, "new")
    assert "m.py/ddp dp=2 float32 accumulate=2" in out
    assert "gone" not in out


def test_save_changes_nothing_and_accept_shows_the_difference_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("save", put("r.json", cell("ddp", "exact"), cell("old", "exact")), "b.json")
    before = Path("b.json").read_bytes()
    put("s.json", cell("ddp", "mismatch", cause=factor()), cell("more", "exact"))

    code, out = run("save", "s.json", "b.json")
    assert code == 2
    assert "[baseline-exists]" in out
    monkeypatch.setenv("CI", "true")
    code, out = run("accept", "s.json", "b.json")
    assert code == 2
    assert out.index("exact -> mismatch (factor: 2 x)") < out.index("[accept-in-ci]")
    assert Path("b.json").read_bytes() == before

    code, out = run("accept", "s.json", "b.json", "--yes", "-k", "*/ddp")
    assert code == 0
    cells = baselines.read("b.json").environments[NAME]
    assert {n.split("/")[1].split()[0]: c.verdict for n, c in cells.items()} == {
        "ddp": "mismatch", "old": "exact"
    }  # fmt: skip
    monkeypatch.setenv("CI", "")
    assert run("accept", "s.json", "b.json")[0] == 0
    assert run("compare", "s.json", "b.json", "--strict")[0] == 0
    assert len(baselines.read("b.json").environments[NAME]) == 2  # `old` is gone


def test_known_failures_hold_until_they_are_over_fixed_or_fail_otherwise(run: Run) -> None:
    bad = cell("ddp", "mismatch", cause=factor())
    run("save", put("r.json", cell("ddp", "exact"), cell("other", "exact")), "b.json")
    put("s.json", bad, cell("other", "exact"))
    words = ("accept", "s.json", "b.json", "--reason", "issue 7")

    assert "[bad-waiver]" in run(*words)[1]
    assert "[bad-waiver]" in run(*words, "--until", "soon")[1]
    code, out = run(*words, "--until", "2999-01-01")
    assert (code, "1 known failures" in out) == (0, True)
    code, out = run("compare", "s.json", "b.json")
    assert code == 0
    assert out.startswith("known      m.py/ddp dp=2 float32: mismatch: issue 7 (until 2999-01-01)")
    assert "until 2999-01-01" in run("list", "b.json")[1]

    otherwise = cell("ddp", "mismatch", cause=Cause(kind="stale", text="old value"))
    code, out = run("compare", put("t.json", otherwise, cell("other", "exact")), "b.json")
    assert code == 1
    assert "factor -> stale" in out
    code, out = run("compare", "r.json", "b.json")
    assert code == 0
    assert "fixed, remove it: known failure of m.py/ddp dp=2 float32" in out

    kept = json.loads(Path("b.json").read_text())
    kept["known_failures"][0]["until"] = "2020-01-01"
    kept["environments"][NAME]["m.py/ddp dp=2 float32"] |= {"verdict": "exact", "fails": False}
    Path("b.json").write_text(json.dumps(kept))
    code, out = run("compare", "s.json", "b.json")
    assert code == 1
    assert "over since 2020-01-01" in out
    assert run("accept", "r.json", "b.json")[0] == 0
    assert baselines.read("b.json").known_failures == []


@pytest.mark.parametrize(
    ("content", "slug"),
    [
        (b"", "not-a-baseline"),
        (b"{\xff", "not-a-baseline"),
        (b"[]", "not-a-baseline"),
        (b'{"baseline_version": 1, "environments": {"a": {"b": {"verdict"', "not-a-baseline"),
        (b'{"schema_version": "1.0"}', "not-a-baseline"),
        (b'{"baseline_version": "x"}', "not-a-baseline"),
        (b'{"baseline_version": 1, "environments": []}', "not-a-baseline"),
        (b'{"baseline_version": 1, "environments": {"a": {"b": {}}}}', "not-a-baseline"),
        (b'{"baseline_version": 1, "environments": {"a": {"b": 3}}}', "not-a-baseline"),
        (b'{"baseline_version": 1, "known_failures": [3]}', "not-a-baseline"),
        (b'{"baseline_version": 1, "known_failures": [{"cell": "a"}]}', "bad-waiver"),
        (b'{"baseline_version": 2}', "baseline-too-new"),
        (b"[" * 100_000, "not-a-baseline"),
    ],
)
def test_a_file_that_is_none_is_refused_and_left_alone(run: Run, content: bytes, slug: str) -> None:
    Path("b.json").write_bytes(content)
    put("r.json", cell("ddp", "exact"))

    for action in (("save", "r.json"), ("accept", "r.json"), ("compare", "r.json"), ("list",)):
        code, out = run(*action, "b.json")
        assert code == 2, out
        assert f"[{slug}]" in out
    assert Path("b.json").read_bytes() == content
    assert "[baseline-unreadable]" in run("compare", "r.json", "none.json")[1]
    wrong = "record-empty" if b"schema_version" in content else "not-a-record"
    assert f"[{wrong}]" in run("save", "b.json", "c.json")[1]
    assert not Path("c.json").exists()


def test_keys_of_a_newer_minor_version_are_kept(run: Run) -> None:
    run("save", put("r.json", cell("ddp", "exact")), "b.json")
    kept = json.loads(Path("b.json").read_text())
    kept["later"] = 1
    kept["environments"][NAME]["m.py/ddp dp=2 float32"]["later"] = [2]
    Path("b.json").write_text(json.dumps(kept))

    assert run("save", put("s.json", cell("more", "exact")), "b.json")[0] == 0
    after = json.loads(Path("b.json").read_text())
    assert after["later"] == 1
    assert after["environments"][NAME]["m.py/ddp dp=2 float32"]["later"] == [2]


@pytest.mark.parametrize("action", ["accept", "history"])
def test_a_kill_while_writing_leaves_the_old_file(run: Run, action: str, root: Path) -> None:
    put("r.json", cell("ddp", "exact"))
    put("s.json", cell("ddp", "rounding"))
    first = {"accept": ("save", "r.json", "f"), "history": ("history", "f", "r.json")}[action]
    again = {"accept": ("accept", "s.json", "f"), "history": ("history", "f", "s.json")}[action]
    assert run(*first)[0] == 0
    before = Path("f").read_bytes()
    code = (
        "import os, signal, sys, pathlib; from spmd_verify.cli import main;"
        "pathlib.Path.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL);"
        "main(['baseline', *sys.argv[1:]])"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, *again],
        env={"PYTHONPATH": str(root)},
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert killed.returncode == -9
    assert Path("f").read_bytes() == before
    assert run(*again)[0] == 0
    assert Path("f").read_bytes() != before


class Page(html.parser.HTMLParser):
    """Collects the tags of a page and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(key in ("src", "href") or key.startswith("on") for key, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_history_has_a_line_a_run_and_a_page_of_trends(run: Run) -> None:
    worst = WorstTensor(tensor="a", stage="loss", step=0, error=1, noise=1, ratio=float("inf"))
    put("r.json", cell("ddp", "exact"), cell("old", "exact"))
    put("s.json", cell("ddp", "mismatch", cause=factor(), worst=worst), exit_code=1)

    assert run("history", "h.jsonl", "r.json")[0] == 0
    code, out = run("history", "h.jsonl", "s.json", "--page", "t.html")
    assert (code, len(out.splitlines())) == (0, 2)
    lines = [json.loads(line) for line in Path("h.jsonl").read_text().splitlines()]
    assert [line["exit_code"] for line in lines] == [0, 1]
    point = lines[1]["cells"]["m.py/ddp dp=2 float32"]
    assert (point["verdict"], point["fails"], point["ratio"]) == ("mismatch", True, "inf")
    page = Page(Path("t.html").read_text())
    assert page.tags.count("polyline") == 2
    assert page.tags.count("circle") == 1
    assert "1 failing, exit code 1" in page.text
    assert run("history", "h.jsonl", "--page", "t.md")[0] == 0
    table = [line for line in Path("t.md").read_text().splitlines() if line.startswith("| m.py")]
    assert len(table) == 2
    assert "mismatch \\(factor\\)" in table[0]
    assert "not in the last" in table[1]


@pytest.mark.parametrize(
    ("line", "slug"),
    [
        ('{"history_version": 1, "cells": {"a"', "not-a-history"),
        ("[]", "not-a-history"),
        ('{"a": 1}', "not-a-history"),
        ('{"history_version": 1, "cells": {"a": {}}}', "not-a-history"),
        ('{"history_version": 2}', "history-too-new"),
    ],
)
def test_a_damaged_history_is_refused_and_left_alone(run: Run, line: str, slug: str) -> None:
    run("history", "h.jsonl", put("r.json", cell("ddp", "exact")))
    with Path("h.jsonl").open("a") as stream:
        stream.write(line)
    before = Path("h.jsonl").read_bytes()

    code, out = run("history", "h.jsonl", "r.json", "--page", "t.html")
    assert code == 2
    assert "h.jsonl:2. Got" in out
    assert f"[{slug}]" in out
    assert Path("h.jsonl").read_bytes() == before
    assert not Path("t.html").exists()


HOSTILE = "a|b`<script>alert(1)</script>\n\x1b[2J[x](javascript:y) {{7*7}}\u202e.py"


def test_hostile_names_stay_text_everywhere(run: Run) -> None:
    odd = cell("ddp", "mismatch", case=HOSTILE, cause=factor("<b>\n\x07</b>"))
    put("r.json", odd, environment={**ENVIRONMENT, "machine": "<i>\n|"})
    put("s.json", cell("ddp", "exact", case=HOSTILE), environment={"machine": "<i>\n|"})
    shown = [run("save", "r.json", "b.json")[1], run("compare", "r.json", "b.json")[1]]
    shown += [run("accept", "r.json", "b.json", "--reason", "a\n\x1bb", "--until", "2999-01-01")[1]]
    shown += [run("list", "b.json")[1], run("compare", "s.json", "b.json")[1]]
    shown += [run("history", "h.jsonl", "r.json", "s.json", "--page", "t.html")[1]]
    run("history", "h.jsonl", "--page", "t.md")

    for text in shown:
        assert all(sign.isprintable() or sign == "\n" for sign in text)
        assert "\nalert" not in text
    assert len(Path("h.jsonl").read_text().splitlines()) == 2
    assert run("compare", "r.json", "b.json")[0] == 0  # found again under its name, and known
    page = Page(Path("t.html").read_text())
    assert not {"script", "b", "i", "a"} & set(page.tags)
    markdown = Path("t.md").read_text()
    assert "<" not in markdown
    assert "](" not in markdown.replace("\\]\\(", "")
    for line in markdown.splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 8


CASE = """
import torch.distributed as dist
FACTOR = {factor}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x)

def get_inputs():
    return [torch.randn(8, 6)]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def loss(output):
    return output.square().mean()

def parallelize_mine(model, mesh):
    return model

def step_mine(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.mul_(FACTOR / dist.get_world_size())
    optimizer.step()
    return value
"""


@pytest.mark.dist
@pytest.mark.slow
def test_a_planted_fault_is_a_regression_until_it_is_fixed_or_known(
    run: Run, write_case: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def check(factor: str, *words: str) -> tuple[int, str, Record]:
        write_case(CASE.format(factor=factor))
        asked = ["model.py", "--styles", "mine", "--steps", "1", "--no-probe", *words]
        code = cli.main([*asked, "--report", "json=r.json"])
        shown = capsys.readouterr()
        return code, shown.out + shown.err, decode(Path("r.json").read_bytes())

    name = "model.py/mine dp=2 float32"
    code, out, _ = check("1.0")
    assert code == 0, out
    assert run("save", "r.json", "b.json")[0] == 0

    code, out, record = check("2.0", "--baseline", "b.json")
    assert code == 1, out
    assert f"regressed  {name}: " in out
    assert "-> mismatch (factor: " in out
    assert record.unknown["baseline"]["changes"][0]["is_regression"]
    assert run("compare", "r.json", "b.json")[0] == 1
    # With the fault known, the run passes and says why; the verdict stays. The cell is taken
    # from the earlier record, since neither the source nor a setting is another.
    words = ("accept", "r.json", "k.json", "--reason", "issue 9", "--until", "2999-01-01")
    assert run(*words)[0] == 0
    code, out, record = check("2.0", "--baseline", "k.json", "--resume", "r.json")
    assert (code, record.cells[0].verdict) == (0, "mismatch"), out
    assert f"waived: {name}: mismatch (factor): issue 9" in out
    assert "mine on dp=2" not in out

    # Another torch minor in the file: said, and nothing is compared.
    text = Path("b.json").read_text()
    Path("n.json").write_text(text.replace("torch 2.13", "torch 2.99"))
    code, out, record = check("2.0", "--baseline", "n.json", "--resume", "r.json", "--exit-zero")
    assert code == 0
    assert "warning: skipped: n.json has no cells for torch 2.13" in out
    assert record.unknown["baseline"]["changes"] == []

    # Fixed: the source is another, so nothing is taken from the record.
    code, out, record = check("1.0", "--baseline", "b.json", "--resume", "r.json")
    assert code == 0, out
    assert "mine on dp=2" in out
    assert "1 cells, all as before" in out
    finished = cli.main(["baseline", "compare", "r.json", "k.json"])
    assert finished == 0
    assert "fixed, remove it: known failure" in capsys.readouterr().out

    code, out, record = check("1.0", "--budget", "1e-9")
    assert (code, record.cells) == (5, [])
    assert "warning: --budget is over, not run: model.py; --resume RECORD goes on" in out


def test_resume_takes_only_cells_of_the_same_source_and_settings(run: Run) -> None:
    settings: dict[str, Any] = {"steps": 3, "seed": 0}
    hashes = {"m.py": "aa"}
    record = Record(
        tool="t", settings=settings, cells=[cell("ddp", "exact"), cell("dies", "error")],
        environment=dict(ENVIRONMENT), unknown={HASHES: hashes},
    )  # fmt: skip
    Path("r.json").write_bytes(encode(record))
    key = ("m.py", "ddp", "dp=2", "float32")

    same = Earlier("r.json", Record(tool="t", settings=settings))
    assert same.cell(key, "aa", ENVIRONMENT) is not None
    assert same.cell(key, "bb", ENVIRONMENT) is None
    assert same.cell(key, "aa", {**ENVIRONMENT, "torch": "2.14.0"}) is None
    assert same.cell(("m.py", "dies", "dp=2", "float32"), "aa", ENVIRONMENT) is None
    other = Earlier("r.json", Record(tool="u", settings={**settings, "steps": 4}))
    assert other.cell(key, "aa", ENVIRONMENT) is None
    assert other.why_not == "r.json: other steps, spmd-verify; every cell runs again"
    with pytest.raises(UsageError, match="record-unreadable"):
        Earlier("none.json", record)
