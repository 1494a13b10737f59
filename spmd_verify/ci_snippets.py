"""`spmd-verify init github|gitlab`: a CI job, printed. Torch-free."""

from __future__ import annotations

import argparse
import shlex
from typing import Final

from spmd_verify.errors import UsageError
from spmd_verify.reporters import FORMATS

_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_INSTALL: Final = (
    f"python -m pip install 'torch>=2.13,<2.14' --index-url {_TORCH_INDEX}",
    "python -m pip install spmd-verify",
)
_GITHUB: Final = """\
# .github/workflows/spmd-verify.yml
name: spmd-verify
on: [push, pull_request]
permissions:
  contents: read
jobs:
  spmd-verify:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    env:
      OMP_NUM_THREADS: "1"  # every rank is a process
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - name: Install
        run: |
{install}
      - name: Check
        run: |
{check}
      - name: Keep the record
        if: always()
        uses: actions/upload-artifact@v4
        with:
          name: spmd-verify
          path: spmd-verify-*
          if-no-files-found: ignore
"""
_GITLAB: Final = """\
# .gitlab-ci.yml
spmd-verify:
  image: python:3.11-slim
  timeout: 1h
  variables:
    OMP_NUM_THREADS: "1"  # every rank is a process
  script:
    - |
{install}
    - |
{check}
  artifacts:
    when: always
    paths:
      - spmd-verify-*
{junit}"""


def snippet(arguments: argparse.Namespace) -> str:
    """Return the job of a service; it names only the reports that this version writes.

    Args:
        arguments: Of the verb `init`.

    Raises:
        UsageError: `init-name`.
    """
    is_github = arguments.service == "github"
    has_junit = not is_github and "junit" in FORMATS
    words = ["spmd-verify", "run", *(_quoted(target) for target in arguments.targets or ["."])]
    for flag in ("styles", "mesh", "baseline"):
        value = getattr(arguments, flag)
        if value is not None:
            words += [f"--{flag}", _quoted(value)]
    words += ["--report", "json=spmd-verify-record.json"]
    if has_junit:
        words += ["--report", "junit=spmd-verify-junit.xml"]
    if is_github and "github" in FORMATS:
        words += ["--report", '"github=$GITHUB_STEP_SUMMARY"']
    indent = " " * (10 if is_github else 6)
    install = "\n".join(indent + line for line in _INSTALL)
    check = indent + " ".join(words)
    if is_github:
        return _GITHUB.format(install=install, check=check)
    junit = "    reports:\n      junit: spmd-verify-junit.xml\n" if has_junit else ""
    return _GITLAB.format(install=install, check=check, junit=junit)


def _quoted(word: str) -> str:
    """Return a word for the shell, in a block of YAML."""
    if not word.isprintable():
        raise UsageError(
            f"Cannot write this into a CI job: {word!r}. It holds a control character. Rename it",
            slug="init-name",
        )
    return shlex.quote(word)
