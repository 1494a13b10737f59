"""What makes a cell fail: verdicts, settings by cell, waivers; and where settings come from."""

from __future__ import annotations

import sys
import types
from datetime import date, timedelta
from pathlib import Path

import pytest

from spmd_verify import cli, config
from spmd_verify.errors import UsageError
from spmd_verify.exit_codes import decide, fails
from spmd_verify.gate import GateRules, Override, Waiver
from spmd_verify.options import Options
from spmd_verify.record import Cause, Cell, Record

TODAY = date(2026, 12, 1)


def cell(verdict: str, style: str = "ddp", *, kind: str | None = None, case: str = "m.py") -> Cell:
    return Cell(
        case=case,
        style=style,
        mesh="dp=2",
        dtype="float32",
        world_size=2,
        runner="processes",
        verdict=verdict,
        cause=None if kind is None else Cause(kind=kind, text="why"),
    )


def judged(rules: GateRules, *cells: Cell) -> list[bool]:
    for one in cells:
        rules.judge(one, TODAY)
    return [fails(one) for one in cells]


def test_fail_on_replaces_the_verdicts_that_fail_but_never_error() -> None:
    rules = GateRules(fail_on=("undetermined", "unsupported"))
    cells = [cell(word) for word in ("mismatch", "undetermined", "unsupported", "error")]

    assert judged(rules, *cells) == [False, True, True, False]
    assert decide(cells[:3]) == 1
    assert decide(cells[:1]) == 0
    assert decide(cells) == 3
    assert cells[3].gate is not None
    assert cells[3].gate.fails


def test_the_last_override_that_matches_a_cell_decides_setting_by_setting() -> None:
    loose, tight = Override(("*/ddp",), fail_on=("mismatch",)), Override(("*/d*",), strict=True)
    rules = GateRules(overrides=(loose, tight, Override(("*/ddp dp=4*",), fail_on=())))

    assert judged(rules, cell("semantic"), cell("mismatch"), cell("undetermined")) == [
        False, True, True
    ]  # fmt: skip
    assert judged(rules, cell("semantic", "fsdp2"), cell("undetermined", "fsdp2")) == [True, False]


def test_a_waived_cell_keeps_its_verdict_and_does_not_fail() -> None:
    waiver = Waiver(("*/ddp",), "batch statistics", TODAY, "semantic", "statistics")
    rules = GateRules(waivers=(waiver,))
    cells = [
        cell("semantic", kind="statistics"),
        cell("semantic", kind="factor"),
        cell("mismatch", kind="statistics"),
        cell("error"),
    ]

    assert judged(rules, *cells) == [False, True, True, False]
    assert decide(cells) == 3
    assert [c.verdict for c in cells[:2]] == ["semantic", "semantic"]
    assert rules.said(cells[:1], TODAY) == [
        "waived: m.py/ddp dp=2 float32: semantic (statistics): batch statistics (until 2026-12-01)"
    ]
    assert "does not cover what fails now" in rules.said(cells[1:3], TODAY)[0]


def test_a_waiver_that_is_over_or_unused_is_said() -> None:
    over = Waiver(("*/ddp",), "soon fixed", TODAY - timedelta(days=1))
    rules = GateRules(waivers=(over, Waiver(("*/fsdp2",), "old"), Waiver(("*/none",), "other")))
    cells = [cell("mismatch"), cell("exact", "fsdp2")]

    assert judged(rules, *cells) == [True, False]
    assert rules.said(cells, TODAY) == [
        "warning: over since 2026-11-30: waiver of */ddp: soon fixed; 1 cell fails for it",
        "warning: fixed, remove it: waiver of */fsdp2: nothing fails: old",
        "note: no cell of this run is meant by: waiver of */none",
    ]
    # A style that refuses today proves nothing about its waiver.
    refused = [cell("unsupported", "fsdp2")]
    assert not GateRules(waivers=(Waiver(("*/fsdp2",), "old"),)).said(refused, TODAY)


def test_brackets_in_a_name_are_no_glob_and_control_characters_no_lines() -> None:
    odd = cell("mismatch", case="a[1]\n\x1b[2K.py")
    rules = GateRules(waivers=(Waiver((f"{odd.id} dp=2 float32",), "known"),))

    assert judged(rules, odd) == [False]
    assert rules.said([odd], TODAY) == [
        "waived: a[1]\\n\\x1b[2K.py/ddp dp=2 float32: mismatch: known"
    ]


FILE = """
[tool.spmd-verify]
steps = 5
fail-on = ["mismatch"]
[[tool.spmd-verify.overrides]]
cells = ["*/ddp"]
strict = true
[[tool.spmd-verify.waivers]]
cells = "*/fsdp2"
reason = "issue 12"
until = 2027-01-31
verdict = "semantic"
"""


def test_overrides_and_waivers_are_read_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(FILE)
    found = config.read(tmp_path, {"SPMD_VERIFY_FAIL_ON": "semantic, mismatch"})

    assert found.settings["fail-on"].value == ("semantic", "mismatch")
    assert "SPMD_VERIFY_FAIL_ON" in found.settings["fail-on"].source
    assert "pyproject.toml" in found.settings["steps"].source
    assert found.overrides == (Override(("*/ddp",), strict=True),)
    assert found.waivers == (Waiver(("*/fsdp2",), "issue 12", date(2027, 1, 31), "semantic"),)


@pytest.mark.parametrize(
    ("text", "slug", "says"),
    [
        ("[[waivers]]\ncells = '*'\n", "bad-waiver", "reason = None"),
        ("[[waivers]]\ncells = '*'\nreason = ' '\n", "bad-waiver", "number 1"),
        ("[[waivers]]\nreason = 'x'\n", "bad-waiver", "cells = None"),
        ("[[waivers]]\ncells='*'\nreason='x'\nuntil='31.1.27'\n", "bad-waiver", "2027-01-31"),
        ("[[waivers]]\ncells='*'\nreason='x'\nuntil=2027-01-01T00:00:00\n", "bad-waiver", "until"),
        ("[[waivers]]\ncells='*'\nreason='x'\nverdict='error'\n", "bad-waiver", "verdict"),
        ("[[waivers]]\ncells='*'\nreasn='x'\n", "unknown-setting", "did you mean 'reason'"),
        ("[waivers]\ncells='*'\n", "bad-setting", r"\[\[tool.spmd-verify.waivers\]\]"),
        ("waivers = [3]\n", "bad-waiver", "Got 3"),
        ("[[overrides]]\nstrict = true\n", "bad-setting", "cells"),
        ("[[overrides]]\ncells='*'\nstrikt=true\n", "unknown-setting", "did you mean 'strict'"),
        ("[[overrides]]\ncells='*'\nsteps=3\n", "unknown-setting", "holds for all cells"),
        ("[[overrides]]\ncells='*'\nfail-on=['mismach']\n", "unknown-verdict", "'mismatch'"),
        ("fail-on = 'exact'\n", "unknown-verdict", "fail-on"),
        ("waiver = 1\n", "unknown-setting", "did you mean 'waivers'"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str, slug: str, says: str) -> None:
    text = text.replace("[[", "[[tool.spmd-verify.").replace("\n[w", "\n[tool.spmd-verify.w")
    text = text if text.startswith("[[") else f"[tool.spmd-verify]\n{text}"
    text = text.replace("\n[waivers]", "\n[tool.spmd-verify.waivers]")
    (tmp_path / "pyproject.toml").write_text(text)

    with pytest.raises(UsageError, match=says) as caught:
        config.read(tmp_path, {})

    assert caught.value.slug == slug


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nspmd-verify = 3\n")

    with pytest.raises(UsageError, match="config-unreadable"):
        config.read(tmp_path, {})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with our settings and a model, and be in it."""
    (tmp_path / "pyproject.toml").write_text(FILE)
    (tmp_path / "m.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("SPMD_VERIFY_SEED", "CI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_config_show_says_where_every_setting_comes_from(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPMD_VERIFY_SEED", "7")

    assert cli.main(["config", "show", "--mesh", "dp=4"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert set(lines) >= set(config.KEYS)
    assert lines["mesh"][1:] == ["dp=4", "flag"]
    assert lines["seed"][1:] == ["7", "environment", "variable", "SPMD_VERIFY_SEED"]
    assert lines["steps"][1] == "5"
    assert lines["steps"][-1] == str(project / "pyproject.toml")
    assert lines["dtype"][1:] == ["float32", "default"]
    assert lines["waiver"][-2:] == ["(until", "2027-01-31)"]
    assert " ".join(lines["override"]) == "override of */ddp: strict = true"


def test_the_run_obeys_the_gate_and_says_what_it_waived(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Record(cells=[cell("semantic"), cell("semantic", "fsdp2"), cell("mismatch", "user")])

    def verify(options: Options, progress: object) -> Record:
        found.settings = options.settings
        return found

    module = types.ModuleType("spmd_verify.run")
    module.verify = verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "spmd_verify.run", module)

    assert cli.main(["m.py"]) == 1
    assert cli.main(["m.py", "--fail-on", "semantic"]) == 1
    del found.cells[2]
    assert cli.main(["m.py"]) == 0  # the file's fail-on is mismatch alone
    del found.cells[0]
    capsys.readouterr()
    assert cli.main(["m.py", "--fail-on", "semantic"]) == 0
    out = capsys.readouterr().out
    assert "waived: m.py/fsdp2 dp=2 float32: semantic: issue 12 (until 2027-01-31)" in out
    assert "0 of 1 cells fail" in out
    assert cli.main(["m.py", "--fail-on", "semantik"]) == 2
    assert "[unknown-verdict]" in capsys.readouterr().err
    # A wrong baseline is said before anything runs.
    found.cells.append(cell("mismatch", "user"))
    assert cli.main(["m.py", "--baseline", "none.json"]) == 2
    assert "[baseline-unreadable]" in capsys.readouterr().err
    (project / "b.json").write_text('{"baseline_version": 1, "known_failures": [{"cell": "*/user", '
        '"reason": "issue 9", "until": "2999-01-01", "verdict": "mismatch"}]}')  # fmt: skip
    assert cli.main(["m.py", "--baseline", "b.json"]) == 0
    assert "mismatch: issue 9 (until 2999-01-01)" in capsys.readouterr().out
    assert cli.main(["certify", "m.py", "--baseline", "b.json"]) == 2
