"""`spmd-verify report RECORD`: every view of a record again, on a machine without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from records import cell, every_verdict

from spmd_verify import cli
from spmd_verify import record as records
from spmd_verify.record import Record
from spmd_verify.reporters import FORMATS, terminal


@pytest.fixture
def record_file(tmp_path: Path) -> Path:
    """Return the path of a record with a cell of every verdict."""
    path = tmp_path / "record.json"
    path.write_bytes(records.encode(every_verdict()))
    return path


def test_without_report_the_text_is_printed(
    record_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(record_file)]) == 0
    assert capsys.readouterr().out == terminal.render(every_verdict()) + "\n"
    assert cli.main(["report", str(record_file), "-v"]) == 0
    assert "4 tensors, mismatch x 2" in capsys.readouterr().out


def test_all_reports_are_written_and_nothing_is_printed(
    record_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name in FORMATS for word in ("--report", f"{name}={tmp_path / name}")]

    assert cli.main(["report", str(record_file), *flags]) == 0
    assert capsys.readouterr().out == ""
    for name, render in FORMATS.items():
        assert (tmp_path / name).read_bytes() == render(every_verdict())


def test_the_record_alone_goes_to_stdout_as_json(
    record_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(record_file), "--format", "json"]) == 0
    assert capsys.readouterr().out == record_file.read_text()
    assert cli.main(["report", str(record_file), "--format", "github"]) == 0
    assert capsys.readouterr().out.count("\n::error ") == 4


def test_no_report_needs_torch(record_file: Path, tmp_path: Path, root: Path) -> None:
    """A finder in front of all others raises for torch and everything that comes with it."""
    code = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "transformers"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, NoTorch())
from spmd_verify.cli import main
sys.exit(main(sys.argv[1:]))
"""
    flags = [word for name in FORMATS for word in ("--report", f"{name}={tmp_path / name}")]
    finished = subprocess.run(
        [sys.executable, "-c", code, "report", str(record_file), "--format", "text", *flags],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert finished.stderr == ""
    assert finished.returncode == 0
    assert finished.stdout.startswith("style")
    assert all((tmp_path / name).stat().st_size for name in FORMATS)


@pytest.mark.parametrize(
    ("content", "slug"),
    [
        (b"", "not-a-record"),
        (b"\xff\xfe\x00", "not-a-record"),
        (b"[" * 100_000, "not-a-record"),
        (b'{"schema_version": "' + b"1" * 5000 + b'"}', "not-a-record"),
        (b'{"name": "another tool", "version": 1}', "not-a-record"),
        (b'{"schema_version": "1.0", "cells": [{}]}', "not-a-record"),
        (b'{"schema_version": "1.0", "notes": 3}', "not-a-record"),
        (b'{"schema_version": "1.0", "duration_seconds": 1e999}', "not-a-record"),
        (b'{"schema_version": "9.0"}', "record-too-new"),
        (records.encode(every_verdict())[:-40], "not-a-record"),
        (None, "record-unreadable"),
    ],
)
def test_what_is_no_record_exits_2_and_overwrites_nothing(
    content: bytes | None, slug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, older = tmp_path / "record.json", tmp_path / "junit.xml"
    older.write_text("an older report")
    if content is not None:
        path.write_bytes(content)

    assert cli.main(["report", str(path), "--report", f"junit={older}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"[{slug}]" in err
    assert str(path) in err
    assert "Traceback" not in err
    assert older.read_text() == "an older report"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--report", "junt=x"], "did you mean 'junit'? [unknown-report-format]"),
        (["--report", "junit"], "[bad-report]"),
        (["--format", "xml"], "valid: text, json, github [unknown-format]"),
        (["--color", "maybe"], "[unknown-color]"),
        (["--report", "junit=/no/such/folder/x"], "[report-not-written]"),
    ],
)
def test_a_wrong_flag_exits_2(
    record_file: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(record_file), *words]) == 2
    assert says in capsys.readouterr().err


def test_color_goes_by_the_flag(record_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(record_file), "--color", "always"]) == 0
    assert "\x1b[31mmismatch\x1b[0m" in capsys.readouterr().out
    assert cli.main(["report", str(record_file)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_stream_that_lacks_a_character_gets_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(records.encode(Record(cells=[cell("層")])))
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    finished = subprocess.run(
        [sys.executable, "-m", "spmd_verify", "report", str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
    assert "\\u5c64" in finished.stdout


def test_a_pipe_that_is_closed_is_no_error(record_file: Path, root: Path) -> None:
    command = f"{sys.executable} -m spmd_verify report {record_file} -vv | true"
    finished = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
