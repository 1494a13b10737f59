"""How the ranks of a pool come to be: forked together, after one process captured for all.

    fork server -> keeper -> seed -> ranks

The *keeper* is what the pool starts. It forks the *seed*, which runs the first steps of the
case once and keeps what the engine captured; then the seed forks every rank, and each rank
begins with those captures instead of making the same ones beside the others. Where the seed
does not get there - it dies in the user's code, or that code leaves threads behind, which no
fork may follow - the keeper forks the ranks itself, without captures, and the cells say what
is wrong. Where there is nothing to capture, that is all that happens.

Every process asks the kernel to be killed with its parent, so killing the keeper ends all.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from spmd_verify.runner import worker
from spmd_verify.runner.worker import WorkerSettings, die_with_parent

EXIT_NO_CAPTURES = 96
"""Exit code of a seed that forked nobody."""

Ends = tuple[Connection, Connection]
"""Of one rank: its end of the messages, and where its parent tells its process id and its end."""


class FamilySettings(msgspec.Struct, frozen=True):
    """What the keeper is told.

    Attributes:
        ranks: Of every rank, in rank order.
        log_path: Where the keeper and the seed write.
        capture: `package.module:function(payload)` that captures and returns what every rank
            finds in `Context.ahead`; empty for nothing.
        payload: Its argument.
    """

    ranks: list[WorkerSettings]
    log_path: str
    capture: str = ""
    payload: bytes = b""


def main(settings_bytes: bytes, ends: Sequence[Ends], lifeline: Connection) -> None:
    """Fork the ranks, tell the pool how each ends, and leave after the last; never returns."""
    settings = msgspec.msgpack.decode(settings_bytes, type=FamilySettings)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker.redirect_output(settings.log_path)
    try:
        if not settings.capture or not _seed_forked(settings, ends, lifeline):
            _fork_ranks(settings, ends, lifeline, ahead=None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _seed_forked(settings: FamilySettings, ends: Sequence[Ends], lifeline: Connection) -> bool:
    """Let a child capture, fork the ranks and wait for them; say whether it came to that."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_seed(settings, ends, lifeline, told=write)
    os.close(write)
    has_forked = bool(os.read(read, 1))
    os.close(read)
    if has_forked:
        for end, status in ends:
            end.close()
            status.close()
    os.waitpid(child, 0)
    return has_forked


def _be_seed(
    settings: FamilySettings, ends: Sequence[Ends], lifeline: Connection, told: int
) -> NoReturn:
    """Capture, then fork the ranks; a failure is only told in the log: the ranks meet it again."""
    die_with_parent()
    exit_code = EXIT_NO_CAPTURES
    try:
        threads = _num_threads()
        ahead = _captured(settings)
        if _num_threads() == threads:
            gc.freeze()
            os.write(told, b"f")
            _fork_ranks(settings, ends, lifeline, ahead)
            exit_code = 0
    except BaseException:  # noqa: BLE001 - the outermost handler: whatever it is, ranks say it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _captured(settings: FamilySettings) -> Any:
    """Call the function that captures."""
    module_name, _, function_name = settings.capture.partition(":")
    capture: Callable[[bytes], Any] = getattr(importlib.import_module(module_name), function_name)
    return capture(settings.payload)


def _num_threads() -> int:
    """Return how many threads this process has, those of C code too; 1 where nobody can say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return 1


def _fork_ranks(
    settings: FamilySettings, ends: Sequence[Ends], lifeline: Connection, ahead: Any
) -> None:
    """Fork every rank and wait for all, telling the pool each process id and exit code."""
    ranks: dict[int, Connection] = {}
    for settings_of_rank, (end, status) in zip(settings.ranks, ends, strict=True):
        pid = os.fork()
        if pid == 0:
            for other, its_status in ends:
                its_status.close()
                if other is not end and not other.closed:
                    other.close()
            worker.main(settings_of_rank, end, lifeline, ahead)
        ranks[pid] = status
        end.close()
        _tell(status, pid)
    while ranks:
        pid, state = os.wait()
        if pid in ranks:
            status = ranks.pop(pid)
            _tell(status, os.waitstatus_to_exitcode(state))
            status.close()


def _tell(status: Connection, number: int) -> None:
    """Send a number to the pool, which may be gone."""
    try:
        status.send_bytes(msgspec.json.encode(number))
    except (BrokenPipeError, ConnectionResetError):
        return
