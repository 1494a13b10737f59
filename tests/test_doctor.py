"""`spmd-verify doctor`: what is there, what will not work, and an exit code that says so."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spmd_verify import cli, doctor


@pytest.mark.dist
def test_it_tries_the_fork_server_and_an_all_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "torch", "numpy", "backends", "cores", "memory", "cuda"):
        assert f"\n{name} " in f"\n{shown}", name
    assert "starts workers" in shown
    assert "2 ranks over gloo have the right sum" in shown


def test_without_torch_it_says_what_still_works(root: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    finished = subprocess.run(
        [sys.executable, "-m", "spmd_verify", "doctor"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 2, finished.stderr
    assert "problem: torch cannot be imported (ImportError: no torch here)" in finished.stdout
    assert "remedy: pip install 'torch==2.13.*'" in finished.stdout
    assert finished.stdout.endswith("nothing can be run before the problems above are solved\n")


def test_a_container_with_little_is_told(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    (tmp_path / "memory.current").write_text(f"{2**28}\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\n")
    found = doctor.memory(tmp_path, tmp_path / "meminfo")
    assert "the container may use 0.5 GiB, 0.2 are left" in found.value
    assert found.problem
    assert not found.is_fatal
    assert doctor.memory(tmp_path / "none", tmp_path / "meminfo").problem == ""
    assert "the container may use 1.5" in doctor.cores(tmp_path).value
    locked = tmp_path / "gone"
    assert doctor.temporary_folder(str(locked)).is_fatal


def test_a_failed_experiment_is_fatal_and_names_the_reason() -> None:
    wrong = doctor._tried("all-reduce", "right", (4.0, "", 0.1), 3.0)
    dead = doctor._tried("fork server", "starts", (None, "rank 0 was killed", 0.1), 1.0)
    assert "got 4.0, expected 3.0" in wrong.problem
    assert "rank 0 was killed" in dead.problem
    assert wrong.is_fatal
    assert "nothing can be run" in doctor.render([wrong])


def test_it_asks_for_the_torch_of_the_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert f"torch>={doctor.TORCH_SERIES}" in ",".join(project["dependencies"])
