"""What is happening right now, on stderr. Torch-free; stdout is for results only.

On a terminal one line is animated; in CI and in files every event is a line, and a
heartbeat names style, step and rank every 30 s.
"""

import os
import sys
import time
from typing import Any, Final, TextIO

from spmd_verify.record import Cell

HEARTBEAT_SECONDS: Final = 30.0


class Progress:
    """Receives the events of one run; every method returns at once and never raises."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """Decide how to show events.

        Args:
            stream: Where to; stderr when left out.
            quiet: Show nothing.
        """
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._status: Any = None
        self._last = time.monotonic()
        self._is_animated = self._stream.isatty() and not os.environ.get("CI") and not quiet

    def note(self, text: str) -> None:
        """Say something worth a line of its own."""
        self._line(text)

    def started(self, what: str) -> None:
        """Begin something that takes time: the reference of a case, or a cell."""
        if not self._is_animated:
            self._line(f"{what} ...")
            return
        if self._status is None:
            from rich.console import Console  # only on a terminal

            self._status = Console(file=self._stream).status(what)
            self._status.start()
        self._status.update(what)

    def finished(self, cell: Cell) -> None:
        """Say how a cell ended."""
        self._line(f"{cell.id} {cell.mesh}: {cell.verdict} ({cell.duration_seconds:.1f} s)")

    def alive(self, style: str, step: int, rank: int) -> None:
        """Say where a running cell is; shown at most every 30 s."""
        now = time.monotonic()
        if now - self._last >= HEARTBEAT_SECONDS:
            self._line(f"still running: {style}, step {step}, rank {rank}")

    def close(self) -> None:
        """End the animation."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _line(self, text: str) -> None:
        """Print one line."""
        self._last = time.monotonic()
        if not self._quiet:
            print(text, file=self._stream, flush=True)
