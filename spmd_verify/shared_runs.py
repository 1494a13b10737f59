"""Runs of the checker that several test processes share: one child, one record. Torch-free.

Whoever holds the lock file of a run makes it; the others wait and read what it left. The lock is
the kernel's, so that a process that dies gives it up and the next one makes the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_verify.record import Record, decode
from spmd_verify.whole_file import write_whole

_PATIENCE_SECONDS: Final = 10.0
# The package may be importable here for reasons that a child does not inherit.
_CHILD: Final = (
    "import sys; sys.path.append({folder!r}); "
    "from spmd_verify.attended import attended_main; sys.exit(attended_main())"
)


_LISTING: Final = (
    "import sys; sys.path.append({folder!r}); "
    "from spmd_verify.cases.listing import write_names; sys.exit(write_names(*sys.argv[1:]))"
)


@dataclass(frozen=True)
class SharedRun:
    """What one run of the checker left.

    Attributes:
        exit_code: Of the command line.
        said: What it printed on stderr, without the last line break.
        record: Its record; None where nothing was run.
    """

    exit_code: int
    said: str
    record: Record | None


def shared_run(words: Sequence[str], *, folder: Path, cwd: Path, content: bytes) -> SharedRun:
    """Run `spmd-verify run WORDS` once per folder; later calls read what the first one found.

    Args:
        words: Targets and flags, without reports.
        folder: Where processes share; made if it does not exist.
        cwd: Where the command is run, so that it finds its configuration.
        content: Of the case file: a changed file is another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.dumps([*words, str(cwd)]).encode()
    key = hashlib.sha256(asked + b"\0" + content).hexdigest()[:24]
    record, outcome = folder / f"{key}.record.json", folder / f"{key}.outcome.json"
    with _locked(folder / f"{key}.lock"):
        if not outcome.exists():
            code, said = _run(words, record, folder / f"{key}.log", cwd)
            write_whole(str(outcome), json.dumps({"exit_code": code, "said": said}).encode())
    found = json.loads(outcome.read_bytes())
    read = decode(record.read_bytes(), str(record)) if record.exists() else None
    return SharedRun(found["exit_code"], found["said"], read)


def case_names(target: str, *, folder: Path, cwd: Path, content: bytes) -> list[str] | str:
    """Return the names of a file's explicit cases, which one child finds by running the file.

    Args:
        target: The file.
        folder: Where processes share.
        cwd: Where the child runs.
        content: Of the file: a changed one is asked again.

    Returns:
        Names; or what the child said where it could not say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.dumps([target, str(cwd)]).encode()
    key = hashlib.sha256(b"cases\0" + asked + b"\0" + content).hexdigest()[:24]
    names, said = folder / f"{key}.cases.json", folder / f"{key}.said"
    with _locked(folder / f"{key}.lock"):
        if not names.exists() and not said.exists():
            code = _LISTING.format(folder=str(Path(__file__).resolve().parent.parent))
            child = subprocess.run(
                [sys.executable, "-c", code, target, str(names)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=cwd,
                check=False,
            )
            if child.returncode:
                write_whole(str(said), child.stderr)
    if said.exists():
        return said.read_text(errors="replace").strip()
    found: list[str] = json.loads(names.read_bytes())
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; waiting can be interrupted."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _run(words: Sequence[str], record: Path, log: Path, cwd: Path) -> tuple[int, str]:
    """Run the checker in a process of its own; return its exit code and stderr.

    It has a process group of its own: Ctrl-C reaches it once, through the pipe that ends.
    """
    code = _CHILD.format(folder=str(Path(__file__).resolve().parent.parent))
    command = [sys.executable, "-c", code, "run", *words, "-q", "--report", f"json={record}"]
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            cwd=cwd,
            process_group=0,
        )
        assert child.stdin is not None, "asked for above"
        try:
            exit_code = child.wait()
        finally:
            child.stdin.close()
            try:
                child.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    return exit_code, log.read_text(errors="replace").rstrip()
