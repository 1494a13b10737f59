"""Seconds by what they were spent on, in wall time and in processor time. Torch-free.

Parts may stand inside each other; a second counts for the innermost one only. Processor time
is that of all threads of the process: it does not grow where others use the cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up the seconds of named parts.

    Attributes:
        seconds: Wall time by part.
        cpu_seconds: Processor time by part.
    """

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = (0.0, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what the body takes for `part`; what runs around it is interrupted."""
        self._count()
        self._running.append(part)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        """Give the time since the last change to the innermost part."""
        now = time.monotonic(), time.process_time()
        if self._running:
            part = self._running[-1]
            for table, after, before in zip(
                (self.seconds, self.cpu_seconds), now, self._since, strict=True
            ):
                table[part] = table.get(part, 0.0) + after - before
        self._since = now
