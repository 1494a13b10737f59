"""Progress goes to its stream, one line per event where nothing is animated."""

import io

from spmd_verify.progress import HEARTBEAT_SECONDS, Progress
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
