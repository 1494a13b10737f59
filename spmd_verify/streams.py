"""What a stream takes: color, something that moves, every character. Torch-free.

Color and movement are two questions: a log may want color, and a terminal none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, TextIO

COLORS: Final[tuple[str, ...]] = ("auto", "always", "never")


def wants_color(choice: str, stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether to write color: `--color`, then NO_COLOR, FORCE_COLOR, and the terminal.

    Args:
        choice: One of `COLORS`, from the command line.
        stream: Where to.
        environ: The environment; the process's own when left out. A variable that is set to
            nothing counts as not set (https://no-color.org).
    """
    found = os.environ if environ is None else environ
    if choice != "auto":
        return choice == "always"
    if found.get("NO_COLOR"):
        return False
    return bool(found.get("FORCE_COLOR")) or (stream.isatty() and found.get("TERM") != "dumb")


def animates(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether a line may be drawn over: on a terminal that can, and never under `CI`."""
    found = os.environ if environ is None else environ
    return stream.isatty() and not found.get("CI") and found.get("TERM") != "dumb"


def printable(text: str, stream: TextIO) -> str:
    """Return text that a stream can encode; what it cannot as `\\u1234`."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
