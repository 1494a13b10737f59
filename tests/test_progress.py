"""Progress goes to its stream, one line per event where nothing is animated."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import msgspec
import pytest

from spmd_verify.progress import HEARTBEAT_SECONDS, Progress, duration
from spmd_verify.record import Cell

CELL = Cell(
    case="m.py",
    style="replicate",
    mesh="dp=2",
    dtype="float32",
    world_size=2,
    runner="lockstep",
    verdict="exact",
    duration_seconds=1.25,
)


def test_every_event_is_a_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.note("a note")
    progress.started("reference of m.py")
    progress.finished(CELL)
    progress.close()

    assert stream.getvalue().splitlines() == [
        "a note",
        "reference of m.py ...",
        "m.py/replicate dp=2: exact (1.2 s)",
    ]


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(stream, quiet=True)
    progress.note("a note")
    progress.finished(CELL)

    assert stream.getvalue() == ""


def test_the_heartbeat_names_style_step_and_rank_when_it_is_time() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.alive("replicate", 1, 0)
    progress._last -= HEARTBEAT_SECONDS
    progress.alive("replicate", 2, 1)

    assert stream.getvalue() == "still running: replicate, step 2, rank 1\n"


def test_what_is_left_is_said_from_the_cells_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("spmd_verify.progress.time.monotonic", lambda: now[0])
    progress = Progress(io.StringIO())
    assert progress._cells_left() == ""
    progress.planned(5)
    assert progress._cells_left() == "0 of 5 cells"
    now[0] = 60.0
    progress.finished(CELL)
    progress.finished(CELL)
    assert progress._cells_left() == "2 of 5 cells, about 1 min 30 s left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def on_terminal(act: Callable[[Progress], None], color: str = "auto") -> str:
    """Show events on a pseudo terminal of 100 columns and return what it was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(stream, color=color)
        act(progress)
        progress.close()
    sent = b""
    try:
        while piece := os.read(ours, 65536):
            sent += piece
    except OSError:  # Linux: the other end is closed and everything is read
        pass
    os.close(ours)
    return sent.decode()


def a_run(progress: Progress) -> None:
    """Two of three cells, one of which fails."""
    progress.started("m.py: reference on one device")
    progress.planned(3)
    progress.note("m.py: a [bold]note[/bold] \x1b[2J")
    progress.started("m.py/ddp on dp=2")
    progress.alive("ddp", 2, 1)
    progress._view._live.refresh()
    progress.finished(CELL)
    progress.finished(msgspec.structs.replace(CELL, verdict="mismatch"))
    progress.started("m.py/fsdp2 on dp=2")
    progress._view._live.refresh()


def test_a_terminal_has_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    sent = on_terminal(a_run)

    assert "m.py/ddp on dp=2; ddp, step 2, rank 1; 0 s; 0 of 3 cells" in sent
    assert "m.py/fsdp2 on dp=2; 0 s; 2 of 3 cells, about 0 s left" in sent
    assert "m.py: a [bold]note[/bold] \\x1b[2J\r\n" in sent
    assert "m.py/replicate dp=2: mismatch (1.2 s)\r\n" in sent
    assert "m.py/replicate dp=2: exact" not in sent
    assert "\x1b[2K" in sent  # the line is drawn over
    assert "\x1b[2J" not in sent
    assert "\x1b[36m" in sent
    assert "\x1b[36m" not in on_terminal(a_run, color="never")


def test_on_a_terminal_under_ci_every_event_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    def act(progress: Progress) -> None:
        progress.started("m.py/ddp on dp=2")
        progress.finished(CELL)

    assert on_terminal(act) == "m.py/ddp on dp=2 ...\r\nm.py/replicate dp=2: exact (1.2 s)\r\n"


def test_no_terminal_no_rich() -> None:
    code = (
        "import sys; from spmd_verify.progress import Progress; p = Progress(); p.started('x');"
        "p.close(); sys.exit('rich' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False
    )

    assert (finished.returncode, finished.stderr) == (0, "x ...\n")
