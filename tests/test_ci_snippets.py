"""`spmd-verify init`: what it prints is YAML, and its lines are commands of this version."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from spmd_verify import cli
from spmd_verify.arguments import parse_arguments, report_argument
from spmd_verify.reporters import FORMATS

ODD = ["it's.py", "a b.py", 'q"$(touch x).py', "a: b #c.py"]


def scripts(service: str, plain: dict[str, Any]) -> list[str]:
    """Return the shell scripts of a job."""
    if service == "github":
        steps = plain["jobs"]["spmd-verify"]["steps"]
        assert {"push", "pull_request"} == set(plain[True])  # YAML 1.1 reads `on` as true
        return [step["run"] for step in steps if "run" in step]
    return list(plain["spmd-verify"]["script"])


@pytest.mark.parametrize("service", ["github", "gitlab"])
@pytest.mark.parametrize("targets", [[], ["model.py"], ODD])
def test_the_job_parses_and_its_commands_are_ours(
    service: str, targets: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mesh", "dp=2", "--styles", "a,b*", "--baseline", "b c.json"]
    assert cli.main(["init", service, *targets, *words]) == 0
    install, check = scripts(service, yaml.safe_load(capsys.readouterr().out))

    assert all(line.startswith("python -m pip install ") for line in install.splitlines())
    shell = subprocess.run(["bash", "-n", "-c", install + check], check=False, timeout=20)
    assert shell.returncode == 0
    told = subprocess.run(
        ["bash", "-c", f"spmd-verify() {{ printf '%s\\0' \"$@\"; }}\n{check}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        env={**os.environ, "GITHUB_STEP_SUMMARY": "summary.md"},
    )
    typed = told.stdout.split("\0")[:-1]
    arguments = parse_arguments(typed)
    assert arguments.targets == (targets or ["."])
    assert (arguments.mesh, arguments.styles, arguments.baseline) == ("dp=2", ["a,b*"], "b c.json")
    assert {report_argument(text)[0] for text in arguments.report} <= set(FORMATS)
    assert shlex.split(check)[:2] == ["spmd-verify", "run"]


def test_a_name_with_a_line_break_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "github", "a\n - run: x.py"]) == 2
    assert "[init-name]" in capsys.readouterr().err
