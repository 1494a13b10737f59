"""What is happening right now, on stderr. Torch-free; stdout is for results only.

On a terminal one line is animated; in CI and in files every event is a line, and a
heartbeat names style, step and rank every 30 s.
"""

import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

from spmd_verify.record import Cell
from spmd_verify.streams import animates, printable, wants_color
from spmd_verify.visible import visible

if TYPE_CHECKING:
    from spmd_verify.live_view import LiveView

HEARTBEAT_SECONDS: Final = 30.0
_PASSES: Final = ("exact", "rounding")


class Progress:
    """Receives the events of one run; every method returns at once and never raises."""

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, color: str = "auto"
    ) -> None:
        """Decide how to show events.

        Args:
            stream: Where to; stderr when left out.
            quiet: Show nothing.
            color: One of `streams.COLORS`.
        """
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._color = color
        self._view: LiveView | None = None
        self._what = self._where = ""
        self._last = self._since = time.monotonic()
        self._began: float | None = None
        self._planned = self._done = 0
        self._is_animated = not quiet and animates(self._stream)

    def note(self, text: str) -> None:
        """Say something worth a line of its own."""
        self._line(text)

    def planned(self, count: int) -> None:
        """Say how many cells there will be, besides those already planned."""
        self._planned += count
        if self._began is None:
            self._began = time.monotonic()

    def started(self, what: str) -> None:
        """Begin something that takes time: the reference of a case, or a cell."""
        if not self._is_animated:
            self._line(f"{what} ...")
            return
        self._what, self._where, self._since = visible(what), "", time.monotonic()
        if self._view is None:
            from spmd_verify.live_view import LiveView  # rich: only on a terminal

            has_color = wants_color(self._color, self._stream)
            self._view = LiveView(self._stream, self._now, has_color=has_color)

    def finished(self, cell: Cell) -> None:
        """Say how a cell ended; where a line is animated, only of those that do not pass."""
        self._done += 1
        if not self._is_animated or cell.verdict not in _PASSES:
            self._line(f"{cell.id} {cell.mesh}: {cell.verdict} ({cell.duration_seconds:.1f} s)")

    def alive(self, style: str, step: int, rank: int) -> None:
        """Say where a running cell is; as a line of its own at most every 30 s."""
        if self._view is not None:
            self._where = visible(f"{style}, step {step}, rank {rank}")
        elif time.monotonic() - self._last >= HEARTBEAT_SECONDS:
            self._line(f"still running: {style}, step {step}, rank {rank}")

    def close(self) -> None:
        """End the animation."""
        if self._view is not None:
            self._view.stop()
            self._view = None

    def _now(self) -> str:
        """Return what runs, where it is, for how long, and what is left."""
        elapsed = duration(time.monotonic() - self._since)
        told = (self._what, self._where, elapsed, self._cells_left())
        return printable("; ".join(part for part in told if part), self._stream)

    def _cells_left(self) -> str:
        """Say how many cells are done, and how long the rest takes if it goes on like that."""
        if not self._planned or self._began is None:
            return ""
        told = f"{self._done} of {self._planned} cells"
        left = self._planned - self._done
        if not self._done or left <= 0:
            return told
        seconds = (time.monotonic() - self._began) / self._done * left
        return f"{told}, about {duration(seconds)} left"

    def _line(self, text: str) -> None:
        """Print one line, above what is animated."""
        self._last = time.monotonic()
        if self._quiet:
            return
        line = printable(visible(text), self._stream)
        if self._view is not None:
            self._view.print_above(line)
        else:
            print(line, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Return a time as `12 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
