"""One worker process: waits for jobs, runs them, and says what became of them.

Runs in a process that `family` forked. Imports nothing but the standard library and the
messages at module level; torch is there already when a job needs it. Whatever happens, the
worker leaves when the controller does: a thread watches a pipe whose other end only the
controller holds, and the kernel is asked to kill the worker with the process that forked it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import msgspec

from spmd_verify.errors import SpmdVerifyError, Unsupported
from spmd_verify.runner.failures import Frame, is_refusal, user_frame
from spmd_verify.runner.messages import (
    Event,
    Finished,
    Job,
    Noted,
    Raised,
    Ready,
    Refused,
    Stop,
    decode_command,
    encode,
)

_PR_SET_PDEATHSIG = 1
"""`PR_SET_PDEATHSIG` of linux/prctl.h."""

EXIT_ORPHAN = 97
"""Exit code of a worker whose controller went away."""

EXIT_RAISED = 1
"""Exit code of a worker after its job raised."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """What one worker is told when it starts.

    Attributes:
        rank: This worker's rank, from 0.
        num_ranks: Workers in the pool.
        backend: Process group backend, or None for a pool without a group.
        device_type: `cpu` or `cuda`.
        store_path: File of the pool's FileStore.
        log_path: Where stdout and stderr of this worker go.
        stack_path: Where the stacks are dumped on SIGUSR1.
        group_timeout_seconds: Timeout of collectives; longer than any job may take.
    """

    rank: int
    num_ranks: int
    backend: str | None
    device_type: str
    store_path: str
    log_path: str
    stack_path: str
    group_timeout_seconds: float


class Context:
    """What a job function knows about the worker it runs in.

    Attributes:
        rank: This worker's rank, from 0.
        num_ranks: Workers in the pool.
        device_type: `cpu` or `cuda`.
        cache: Lives as long as the worker; jobs keep what later jobs can use again.
        ahead: What was captured before the worker was forked, None for nothing.
    """

    def __init__(
        self, settings: WorkerSettings, send: Callable[[Event], None], ahead: Any = None
    ) -> None:
        """Take over what the worker was told; `send` gives an event to the controller."""
        self.ahead = ahead
        self.rank = settings.rank
        self.num_ranks = settings.num_ranks
        self.device_type = settings.device_type
        self.has_group = settings.backend is not None
        self.cache: dict[str, Any] = {}
        self.job_number = -1
        self._send = send

    def note(self, text: str) -> None:
        """Tell the controller what the job is doing; shown in heartbeats and failures."""
        self._send(Noted(self.job_number, text))


JobFunction = Callable[[Context, bytes], bytes]
_JobFunctionT = TypeVar("_JobFunctionT", bound=JobFunction)


def job(function: _JobFunctionT) -> _JobFunctionT:
    """Mark `function(context, payload) -> payload` as one that workers may be told to run."""
    function.__dict__["is_worker_job"] = True
    return function


def find_job(name: str) -> JobFunction:
    """Import the job function called `package.module:function`."""
    module_name, _, function_name = name.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    if not getattr(function, "is_worker_job", False):
        raise LookupError(f"{name} is not marked with @spmd_verify.runner.worker.job")
    return function


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(
    settings: WorkerSettings, connection: Connection, lifeline: Connection, ahead: Any = None
) -> NoReturn:
    """Serve jobs from `connection` until told to stop."""
    die_with_parent()
    _watch(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redirect_output(settings.log_path)
    stack_file = open(settings.stack_path, "w")  # noqa: SIM115 - lives as long as the worker
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    faulthandler.enable()
    lock = threading.Lock()

    def send(event: Event) -> None:
        with lock:
            connection.send_bytes(encode(event))

    exit_code = EXIT_RAISED
    try:
        exit_code = _serve(Context(settings, send, ahead), settings, connection, send)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        exit_code = EXIT_ORPHAN
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _serve(
    context: Context,
    settings: WorkerSettings,
    connection: Connection,
    send: Callable[[Event], None],
) -> int:
    """Run jobs until `Stop` or until one raises; return the exit code."""
    import torch

    torch.set_num_threads(1)
    send(Ready(os.getpid(), threading.main_thread().ident or 0))
    while True:
        command = decode_command(connection.recv_bytes())
        if isinstance(command, Stop):
            return 0
        context.job_number = command.number
        event = _run(settings, context, command)
        send(event)
        if isinstance(event, Raised):
            return EXIT_RAISED


def _run(settings: WorkerSettings, context: Context, command: Job) -> Event:
    """Run one job inside its own process group; turn any exception into an event."""
    try:
        function = find_job(command.function)
        if settings.backend is None:
            return Finished(command.number, function(context, command.payload))
        _enter_group(settings, command)
        payload = function(context, command.payload)
        _leave_group(all_are_here=True)
        return Finished(command.number, payload)
    except Unsupported as refusal:
        _leave_group(all_are_here=False)
        return Refused(command.number, refusal.message, refusal.slug)
    except BaseException as error:  # noqa: BLE001 - the outermost handler: report, then leave
        traceback.print_exc()
        return _raised(command.number, error)


def _enter_group(settings: WorkerSettings, command: Job) -> None:
    """Join the process group of this job, under a prefix no other job uses."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.distributed.distributed_c10d import PrefixStore

    from spmd_verify.runner.one_in_flight import use_one_thread

    use_one_thread()
    if settings.device_type == "cuda":
        torch.cuda.set_device(settings.rank)
    store = FileStore(settings.store_path, settings.num_ranks)
    dist.init_process_group(
        settings.backend,
        store=PrefixStore(f"job{command.number}", store),
        rank=settings.rank,
        world_size=settings.num_ranks,
        timeout=datetime.timedelta(seconds=settings.group_timeout_seconds),
    )


def _leave_group(*, all_are_here: bool) -> None:
    """Destroy the group; first wait for the others, so that nobody's last bytes are lost."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        if all_are_here:
            dist.barrier()
        dist.destroy_process_group()


def _raised(number: int, error: BaseException) -> Raised:
    """Describe an exception, with the user's own line where there is one."""
    frames = [
        Frame(entry.filename, entry.lineno or 0, entry.name)
        for entry in reversed(traceback.extract_tb(error.__traceback__))
    ]
    frame = user_frame(frames)
    ours = error if isinstance(error, SpmdVerifyError) else None
    return Raised(
        job=number,
        kind=type(error).__name__,
        message=str(error) if ours is None else ours.message,
        slug=None if ours is None else ours.slug,
        detail="" if ours is None else ours.detail,
        where=None if frame is None else f"{frame.file}:{frame.line}",
        traceback="".join(traceback.format_exception(error)),
        is_torchs=is_refusal(frames),
    )


def _watch(lifeline: Connection) -> None:
    """Leave at once when the controller's end of `lifeline` closes, whatever runs."""

    def wait() -> None:
        try:
            lifeline.recv_bytes()
        except (EOFError, OSError):
            os._exit(EXIT_ORPHAN)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


def redirect_output(log_path: str) -> None:
    """Send this process's stdout and stderr, those of C code too, to its log."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - never closed
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - never closed
