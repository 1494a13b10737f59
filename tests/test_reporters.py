"""A report file is written whole or not at all."""

from pathlib import Path

import pytest

from spmd_verify.errors import UsageError
from spmd_verify.record import Record, decode
from spmd_verify.reporters import write_report


def test_the_json_report_is_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("an older one")
    write_report(Record(tool="spmd-verify"), "json", str(path))

    assert decode(path.read_bytes()).tool == "spmd-verify"
    assert list(tmp_path.iterdir()) == [path]


def test_a_dash_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_report(Record(), "json", "-")

    assert decode(capsys.readouterr().out).cells == []


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory") as caught:
        write_report(Record(), "json", str(tmp_path / "missing" / "record.json"))

    assert caught.value.slug == "report-not-written"


def test_a_folder_is_no_file_and_nothing_is_left_behind(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()

    with pytest.raises(UsageError) as caught:
        write_report(Record(), "json", str(target))

    assert caught.value.slug == "report-not-written"
    assert list(tmp_path.iterdir()) == [target]
