"""The folders of one run: a work folder that always goes, a log folder that stays on failure.

A controller that is killed cannot clean up. Its work folder holds a lock file that the
kernel unlocks with the process, so the next run removes every work folder without an owner.
Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator

WORK_PREFIX = "spmd-verify-work-"
LOG_PREFIX = "spmd-verify-logs-"
_LOCK = "owner.lock"


class LogFolder:
    """Where the rank logs of one run are.

    Attributes:
        path: The folder; exists.
        is_kept: Set to True to keep a temporary folder after the run.
    """

    def __init__(self, path: str | None) -> None:
        """Use the folder `path`, or a temporary one if it is None."""
        self.is_temporary = path is None
        self.path = tempfile.mkdtemp(prefix=LOG_PREFIX) if path is None else path
        self.is_kept = not self.is_temporary
        os.makedirs(self.path, exist_ok=True)

    def __enter__(self) -> LogFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_kept:
            shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def work_folder() -> Iterator[str]:
    """Give a temporary folder that is removed at the end; remove those of dead runs first."""
    _remove_abandoned()
    path = tempfile.mkdtemp(prefix=WORK_PREFIX)
    lock = os.open(os.path.join(path, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    """Remove the work folders whose owner is gone."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        if name.startswith(WORK_PREFIX):
            path = os.path.join(root, name)
            if _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: str) -> bool:
    """Say whether nobody holds the lock of a work folder; one without a lock is being made."""
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
