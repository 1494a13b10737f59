"""Folders of a run are removed, also those of runs that could not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_verify.runner.folders import WORK_PREFIX, LogFolder, work_folder


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_work_folder_is_removed():
    with work_folder() as path:
        assert os.path.isdir(path)

    assert not os.path.exists(path)


def test_the_folder_of_a_killed_run_is_removed_by_the_next():
    program = (
        "import os, signal\n"
        "from spmd_verify.runner.folders import work_folder\n"
        "with work_folder() as path:\n"
        "    print(path, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    abandoned = killed.stdout.strip()
    assert os.path.isdir(abandoned)
    with work_folder():
        assert not os.path.exists(abandoned)


def test_the_folder_of_a_running_run_stays():
    with work_folder() as first, work_folder() as second:
        assert os.path.isdir(first)
        assert os.path.isdir(second)


def test_a_folder_without_a_lock_is_left_alone(tmp_path: Path):
    made = tmp_path / f"{WORK_PREFIX}new"
    made.mkdir()
    with work_folder():
        assert made.exists()


def test_temporary_logs_go_unless_kept():
    with LogFolder(None) as logs:
        pass
    assert not os.path.exists(logs.path)
    with LogFolder(None) as logs:
        logs.is_kept = True
    assert os.path.isdir(logs.path)


def test_a_given_log_folder_is_made_and_stays(tmp_path: Path):
    with LogFolder(str(tmp_path / "a" / "logs")) as logs:
        pass
    assert os.path.isdir(logs.path)
