"""The pool's view of a process that another process forked: alive or not, and how it ended."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import msgspec


class RankProcess:
    """One rank's process, known by what its parent tells of it: its id, then its exit code.

    Attributes:
        pid: Process id; None before it is forked.
        exitcode: As `Process.exitcode`; minus SIGKILL where its parent died, which kills it.
    """

    def __init__(self, status: Connection) -> None:
        """Listen to `status`."""
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._status = status

    @property
    def sentinel(self) -> Connection:
        """What becomes ready when there is something to be told."""
        return self._status

    def is_alive(self) -> bool:
        """Say whether the process has not ended, as far as its parent has told."""
        self.join(0.0)
        return self.exitcode is None

    def join(self, timeout_seconds: float) -> None:
        """Wait until it has ended, but no longer than that."""
        while self.exitcode is None and self._status.poll(timeout_seconds):
            try:
                number = msgspec.json.decode(self._status.recv_bytes(), type=int)
            except (EOFError, ConnectionResetError):
                self.exitcode = -signal.SIGKILL
                return
            if self.pid is None:
                self.pid = number
            else:
                self.exitcode = number

    def dump_stacks(self) -> None:
        """Ask for the stacks of its threads, see `worker.main`."""
        if self.pid is not None and self.is_alive():
            os.kill(self.pid, signal.SIGUSR1)

    def close(self) -> None:
        """Stop listening."""
        self._status.close()
