"""The README's commands are real, and its main one does what is printed there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_verify.arguments import parse_arguments


def _commands(root: Path) -> list[list[str]]:
    """Return the words of every `spmd-verify` command in the README's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)[1:] for line in lines if line.startswith("spmd-verify")
    ]


def test_every_command_parses(root: Path) -> None:
    commands = _commands(root)

    assert len(commands) >= 5
    for words in commands:
        if "--help" not in words:
            parse_arguments(words)


def test_the_page_is_short(root: Path) -> None:
    assert len((root / "README.md").read_text().splitlines()) <= 120
    assert len((root / "CONTRIBUTING.md").read_text().splitlines()) <= 150


@pytest.mark.dist
@pytest.mark.slow
def test_the_main_job_passes_on_the_example_as_printed(root: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "spmd_verify", "examples/mlp.py", "--mesh", "4"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    printed = re.search(r"prints\n\n```\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert printed is not None
    shown, found = printed[1].splitlines(), finished.stdout.splitlines()
    assert found[0] == shown[0]
    assert [line.split()[:3] for line in found] == [line.split()[:3] for line in shown]
