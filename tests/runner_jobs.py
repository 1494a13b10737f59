"""Job functions for the tests of the runner; imported inside workers by name."""

from __future__ import annotations

import os
import signal
import threading
import time

import msgspec

from spmd_verify.errors import CaseError, Unsupported
from spmd_verify.runner.worker import Context, job


@job
def echo(context: Context, payload: bytes) -> bytes:
    """Return the payload with the rank behind it."""
    return payload + str(context.rank).encode()


@job
def all_reduce(context: Context, _payload: bytes) -> bytes:
    """Sum the ranks' numbers over the group."""
    import torch
    import torch.distributed as dist

    context.note("entering all_reduce")
    x = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(x)
    return str(x.item()).encode()


@job
def threads(_context: Context, _payload: bytes) -> bytes:
    """Say how many threads torch uses and which folders a worker sees."""
    import torch

    return msgspec.json.encode([torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]])


@job
def group_threads(_context: Context, _payload: bytes) -> bytes:
    """Say how many threads the group of all ranks has, and one made later."""
    import torch
    import torch.distributed as dist

    groups = (dist.group.WORLD, dist.new_group())
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert all(isinstance(b, dist.distributed_c10d.ProcessGroupGloo) for b in backends)
    return msgspec.json.encode([backend.options._threads for backend in backends])


@job
def talk(_context: Context, _payload: bytes) -> bytes:
    """Write to stdout from Python and to stderr below it."""
    print("from Python")  # noqa: T201
    os.write(2, b"from C\n")
    return b""


@job
def misbehave(context: Context, payload: bytes) -> bytes:
    """Let the last rank do what `payload` says; the others wait for it in an all_reduce."""
    import torch
    import torch.distributed as dist

    context.note("step 1")
    is_culprit = context.rank == context.num_ranks - 1
    what = payload.decode()
    if is_culprit and what == "raise":
        raise ValueError("planted: the loss is wrong")
    if is_culprit and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_culprit and what == "exit":
        os._exit(7)
    if is_culprit and what == "hang":
        _hang()
    if is_culprit and what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_culprit and what == "usage":
        raise CaseError("planted", slug="no-module", detail="the user's lines")
    if what == "refuse":
        raise Unsupported("no rule for aten.foo at model.py:3", slug="capture")
    if is_culprit and what == "refuse-alone":
        raise Unsupported("only this rank refuses", slug="capture")
    size = 7 if is_culprit and what == "shape" else 1000
    dist.all_reduce(torch.ones(size))
    return b"survived"


def _hang() -> None:
    """Never return, in Python code of the user."""
    while True:
        time.sleep(0.05)


def capture(payload: bytes) -> str:
    """Do before the ranks are forked what `payload` says, and return what they get."""
    what = payload.decode()
    if what == "raise":
        raise ValueError("planted: no capture")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return f"captured in {os.getpid()}"


@job
def ahead(context: Context, _payload: bytes) -> bytes:
    """Say what was captured before this rank was forked, and who forked it."""
    return msgspec.json.encode([context.ahead, f"captured in {os.getppid()}"])
