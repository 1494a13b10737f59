"""A pool of worker processes that outlives its jobs, watched by the controller.

The workers are one family, see `family.py`. The controller owns two things per worker: a pipe
for messages, and one that tells how its process ended; and the only writing end of the
family's lifeline. One loop waits on all of them, so a rank that dies, raises or hangs becomes
a `Failure` and never a hang of the controller. After a failure
the pool is killed, and started again by the next job; a group is never used again after an
error. Torch-free: the rendezvous is a file, so there is no port and no store to serve.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import msgspec

from spmd_verify.errors import InternalError
from spmd_verify.runner import failures, family
from spmd_verify.runner.failures import Failure, RankEnd
from spmd_verify.runner.messages import (
    Command,
    Finished,
    Job,
    Noted,
    Raised,
    Ready,
    Refused,
    Stop,
    decode_event,
    encode,
)
from spmd_verify.runner.rank_process import RankProcess
from spmd_verify.runner.worker import WorkerSettings

PRELOAD = "spmd_verify.runner.preload"

_GRACE_SECONDS = 0.3
"""How long to collect other ranks' ends after the root cause is known."""

_PATIENCE_SECONDS = 3.0
"""How long to wait for the others after a rank refused, or only lost a connection."""

_STACK_SECONDS = 0.5
"""How long to wait for the stacks of hung ranks (measured: 0.2 s)."""

_HEARTBEAT_SECONDS = 5.0
"""How often `on_note` is told again what a silent rank said last."""

LONGEST_TEMPORARY_FOLDER = 103 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Characters: a socket's path has at most 103 on macOS and 107 on Linux (unix(4), unix(7))."""

SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Asked in this order where the temporary folder's path is too long for a socket."""

_LOG_TAIL_BYTES = 4_000
_STACK_BYTES = 1_000_000

OnNote = Callable[[int, str], None]


def start_fork_server(extra_modules: Sequence[str] = ()) -> None:
    """Start the fork server and let it import in the background; returns at once.

    Call it from the main thread: the server dies with the thread that started it.

    Args:
        extra_modules: Imported after the usual list, for example `transformers`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([PRELOAD, *extra_modules])
    from multiprocessing import forkserver

    with _without_main(), _short_temporary_folder():
        forkserver.ensure_running()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which multiprocessing would import again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _short_temporary_folder() -> Iterator[None]:
    """Keep multiprocessing's sockets where their paths fit, whatever TMPDIR says."""
    usual = tempfile.tempdir
    if len(tempfile.gettempdir()) > LONGEST_TEMPORARY_FOLDER:
        short = (folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK))
        tempfile.tempdir = next(short, usual)
    try:
        yield
    finally:
        tempfile.tempdir = usual


class _Rank(msgspec.Struct):
    """The controller's view of one worker; `end` and `last_note` belong to the current job."""

    rank: int
    process: RankProcess
    connection: Any
    log_path: str
    stack_path: str
    main_thread: int = 0
    end: RankEnd | None = None
    payload: bytes | None = None
    last_note: str | None = None


class Pool:
    """Workers of one kind; runs one job at a time on all of them.

    Attributes:
        num_ranks: Workers in the pool.
        starts: How often the workers have been started.
        start_seconds: How long the last job waited until all workers were there.
        capture: What the next workers start with: function and payload of
            `family.FamilySettings`, or None.
    """

    start_seconds: float = 0.0
    capture: tuple[str, bytes] | None = None

    def __init__(
        self,
        num_ranks: int,
        *,
        work_dir: str,
        log_dir: str,
        backend: str | None = None,
        device_type: str = "cpu",
        name: str = "rank",
    ) -> None:
        """Describe the pool; its workers start with the first job, or with `start`.

        Args:
            num_ranks: Workers, >= 1.
            work_dir: Existing folder for the rendezvous and the stacks.
            log_dir: Existing folder for the logs `<name><rank>.log`.
            backend: Process group backend; None for workers without a group.
            device_type: `cpu` or `cuda`.
            name: First part of the workers' file names; unique in `work_dir`.
        """
        self.num_ranks = num_ranks
        self.starts = 0
        self._work_dir = work_dir
        self._log_dir = log_dir
        self._backend = backend
        self._device_type = device_type
        self._name = name
        self._ranks: list[_Rank] = []
        self._keeper: ForkServerProcess | None = None
        self._lifeline: Connection | None = None
        self._jobs = 0
        self._started_at = 0.0
        self._timeout_seconds = 0.0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there."""
        known = [rank.process.pid for rank in self._ranks if rank.process.is_alive()]
        return [pid for pid in known if pid is not None]

    def start(self) -> None:
        """Start the workers if they are not running; a broken pool is replaced."""
        if self._ranks and all(rank.process.is_alive() for rank in self._ranks):
            return
        self.kill()
        start_fork_server_if_needed()
        # A file of its own: addresses of an earlier pool under the same keys would be dialled.
        store_dir = tempfile.mkdtemp(prefix=f"{self._name}-store-", dir=self._work_dir)
        store_path = os.path.join(store_dir, "store")
        self.starts += 1
        self._start_family([self._settings(rank, store_path) for rank in range(self.num_ranks)])

    def run(
        self,
        function: str,
        payload: bytes | Sequence[bytes],
        *,
        timeout_seconds: float,
        on_note: OnNote | None = None,
    ) -> list[bytes] | Failure:
        """Run a job on every rank and wait for it: `submit`, then `collect`."""
        self.submit(function, payload, timeout_seconds=timeout_seconds)
        return self.collect(on_note)

    def submit(
        self, function: str, payload: bytes | Sequence[bytes], *, timeout_seconds: float
    ) -> None:
        """Give every rank a job, starting the workers where needed.

        Args:
            function: `package.module:name` of a function marked with `worker.job`.
            payload: The same bytes for all ranks, or one per rank.
            timeout_seconds: Time limit of the job, counted from here.
        """
        self.start()
        payloads = [payload] * self.num_ranks if isinstance(payload, bytes) else payload
        self._started_at = time.monotonic()
        self.start_seconds = 0.0
        self._timeout_seconds = timeout_seconds
        for rank, part in zip(self._ranks, payloads, strict=True):
            rank.end, rank.payload, rank.last_note = None, None, None
            self._send(rank, Job(self._jobs, function, part, timeout_seconds))
        self._jobs += 1

    def collect(self, on_note: OnNote | None = None) -> list[bytes] | Failure:
        """Wait for the job given by `submit`.

        Args:
            on_note: Called as `on_note(rank, text)` when a rank says what it is doing.

        Returns:
            One result per rank, in rank order, or why there is none. After a failure the
            workers are gone, unless every rank refused the case and lives.
        """
        is_timeout = self._wait_for_ends(on_note)
        seconds = time.monotonic() - self._started_at
        if all(rank.payload is not None for rank in self._ranks):
            return [rank.payload for rank in self._ranks if rank.payload is not None]
        if is_timeout:
            self._dump_stacks()
        ends = [self._end_of(rank) for rank in self._ranks]
        failure = failures.diagnose(
            ends,
            seconds=seconds,
            is_timeout=is_timeout,
            log_base=os.path.join(self._log_dir, self._name),
        )
        if not all(isinstance(end.event, Refused) for end in ends):
            self.kill()
        return failure

    def stop(self) -> None:
        """Let the workers leave, and kill those that do not within a second."""
        for rank in self._ranks:
            if rank.process.is_alive():
                self._send(rank, Stop())
        deadline = time.monotonic() + 1.0
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill every worker that is still there, and forget them all."""
        if self._keeper is None or self._lifeline is None:
            return
        self._keeper.kill()  # and the kernel the others with it; the lifeline is the second way
        self._lifeline.close()
        self._keeper.join()
        self._keeper.close()
        for rank in self._ranks:
            rank.process.join(1.0)
            rank.process.close()
            rank.connection.close()
        self._ranks, self._keeper, self._lifeline = [], None, None

    def _settings(self, rank: int, store_path: str) -> WorkerSettings:
        """Return what one worker is told."""
        return WorkerSettings(
            rank=rank,
            num_ranks=self.num_ranks,
            backend=self._backend,
            device_type=self._device_type,
            store_path=store_path,
            log_path=os.path.join(self._log_dir, f"{self._name}{rank}.log"),
            stack_path=os.path.join(self._work_dir, f"{self._name}{rank}-{self.starts}.stack"),
            group_timeout_seconds=24 * 3600.0,
        )

    def _start_family(self, workers: list[WorkerSettings]) -> None:
        """Start the workers and keep the controller's ends of their pipes."""
        context = get_context("forkserver")
        their_lifeline, self._lifeline = context.Pipe(duplex=False)
        theirs = []
        for settings in workers:
            connection, their_end = context.Pipe(duplex=True)
            status, their_status = context.Pipe(duplex=False)
            theirs.append((their_end, their_status))
            self._ranks.append(
                _Rank(
                    settings.rank, RankProcess(status), connection,
                    settings.log_path, settings.stack_path,
                )
            )  # fmt: skip
        log_path = os.path.join(self._log_dir, f"{self._name}-start.log")
        function, payload = self.capture or ("", b"")
        settings_of_all = family.FamilySettings(workers, log_path, function, payload)
        self._keeper = context.Process(
            target=family.main,
            args=(msgspec.msgpack.encode(settings_of_all), theirs, their_lifeline),
            name=self._name,
            daemon=True,
        )
        try:
            with _without_main():
                self._keeper.start()
        except (EOFError, ConnectionError) as error:
            raise InternalError(
                f"No worker was started: {self._name}. The process that starts workers "
                f"is gone ({type(error).__name__}); it was killed, or importing torch or "
                f"spmd_verify failed in it: see its output above. Run the command again",
                slug="fork-server",
            ) from error
        for end in (their_lifeline, *(end for pair in theirs for end in pair)):
            end.close()

    def _send(self, rank: _Rank, command: Command) -> None:
        """Send a command; a worker that is gone is noticed by the loop, not here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            rank.connection.send_bytes(encode(command))

    def _wait_for_ends(self, on_note: OnNote | None) -> bool:
        """Take events until every rank has ended; return whether the time limit struck."""
        deadline = self._started_at + self._timeout_seconds
        is_limited_by_failure = False
        while pending := [rank for rank in self._ranks if rank.end is None]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return not is_limited_by_failure
            sources: dict[Any, _Rank] = {rank.connection: rank for rank in pending}
            sources.update({rank.process.sentinel: rank for rank in pending})
            ready = mp_connection.wait(list(sources), min(remaining, _HEARTBEAT_SECONDS))
            if not ready and on_note is not None and pending[0].last_note is not None:
                on_note(pending[0].rank, pending[0].last_note)
            for rank in {sources[source].rank: sources[source] for source in ready}.values():
                self._take(rank, on_note)
            grace = self._grace()
            if grace is not None and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                is_limited_by_failure = True
        return False

    def _take(self, rank: _Rank, on_note: OnNote | None) -> None:
        """Read all that a rank has sent; notice its death after its last words."""
        channel: Connection = rank.connection
        try:
            while rank.end is None and channel.poll():
                self._take_event(rank, channel.recv_bytes(), on_note)
        except (EOFError, ConnectionResetError):
            rank.process.join(1.0)
        if rank.end is None and not rank.process.is_alive():
            rank.end = self._died(rank)

    def _take_event(self, rank: _Rank, message: bytes, on_note: OnNote | None) -> None:
        """Record one event of one rank."""
        event = decode_event(message)
        match event:
            case Ready():
                rank.main_thread = event.main_thread
                self.start_seconds = time.monotonic() - self._started_at
            case Noted():
                rank.last_note = event.text
                if on_note is not None:
                    on_note(rank.rank, event.text)
            case Finished():
                rank.payload = event.payload
                rank.end = RankEnd(rank.rank, self._next_order(), is_done=True)
            case Raised() | Refused():
                rank.end = RankEnd(rank.rank, self._next_order(), event=event)

    def _grace(self) -> float | None:
        """Seconds to go on waiting after a rank's failure, None while there is none."""
        grace: float | None = None
        for rank in self._ranks:
            end = rank.end
            if end is None or end.is_done:
                continue
            is_patient = isinstance(end.event, Refused) or (
                isinstance(end.event, Raised) and failures.is_follower(end.event)
            )
            if not is_patient:
                return _GRACE_SECONDS
            grace = _PATIENCE_SECONDS
        return grace

    def _next_order(self) -> int:
        """Count the ends of the current job."""
        return sum(rank.end is not None for rank in self._ranks)

    def _died(self, rank: _Rank) -> RankEnd:
        """Describe the end of a process that is gone."""
        return RankEnd(rank.rank, self._next_order(), exit_code=rank.process.exitcode)

    def _end_of(self, rank: _Rank) -> RankEnd:
        """Complete what is known of a rank for the diagnosis."""
        end = rank.end or RankEnd(rank.rank, self.num_ranks)
        stack = None
        if rank.end is None:
            stack = failures.parse_stack(_tail(rank.stack_path, _STACK_BYTES), rank.main_thread)
        return msgspec.structs.replace(
            end,
            last_note=rank.last_note,
            stack=stack,
            log_tail=_tail(rank.log_path, _LOG_TAIL_BYTES),
        )

    def _dump_stacks(self) -> None:
        """Ask every rank without an answer for its stacks and give it time to write them."""
        hung = [rank for rank in self._ranks if rank.end is None]
        for rank in hung:
            rank.process.dump_stacks()
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not all(_tail(rank.stack_path, 1) for rank in hung):
            time.sleep(0.02)
        time.sleep(0.05)


def start_fork_server_if_needed() -> None:
    """Start the fork server with the usual list unless it runs already."""
    from multiprocessing import forkserver

    if getattr(forkserver._forkserver, "_forkserver_pid", None) is None:
        start_fork_server()


def _tail(path: str, num_bytes: int) -> str:
    """Return the last bytes of a text file, or "" when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
