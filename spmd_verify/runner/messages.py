"""The messages between the controller and its workers.

Frozen structures, sent as msgpack bytes over a pipe: nothing is pickled. Torch-free.
"""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True, tag=True):
    """Controller to worker: run one registered job function.

    Attributes:
        number: Counts jobs of one pool, from 0.
        function: `package.module:name` of a function marked with `worker.job`.
        payload: What the function gets, in the function's own encoding.
        timeout_seconds: How long the controller will wait for the job.
    """

    number: int
    function: str
    payload: bytes
    timeout_seconds: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Controller to worker: leave."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: started, and waiting for its first job."""

    pid: int
    main_thread: int


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: what the job is doing now, in a few words."""

    job: int
    text: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: the job's result."""

    job: int
    payload: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: the style refuses the case; the worker is still usable."""

    job: int
    reason: str
    slug: str


class Raised(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: the job raised; the worker leaves after sending this.

    Attributes:
        job: Number of the job.
        kind: Name of the exception's class.
        message: The exception's text, without the slug.
        slug: Its slug if it is a `SpmdVerifyError`, else None.
        detail: Its detail if it is a `SpmdVerifyError`, else "".
        where: `file:line` of the innermost frame in the user's own code, or None.
        traceback: The whole traceback as text.
        is_torchs: Whether a parallel style of torch raised it, called by no style of the file.
    """

    job: int
    kind: str
    message: str
    slug: str | None
    detail: str
    where: str | None
    traceback: str
    is_torchs: bool = False


Command = Job | Stop
Event = Ready | Noted | Finished | Refused | Raised

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
