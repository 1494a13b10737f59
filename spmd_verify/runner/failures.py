"""What a broken job means: which rank is the cause, which ranks only followed, and where.

Pure functions over what the controller saw; torch-free. The rule: the first event that is
not a connection or timeout error of a collective is the root cause, everything else follows
from it. When nobody reported anything, the ranks that are not inside a collective are the
cause; if all are, they disagree about which collective comes next.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Literal, NamedTuple, NoReturn

import msgspec

from spmd_verify import errors
from spmd_verify.runner.messages import Raised, Refused
from spmd_verify.user_code import is_user_file

FailureKind = Literal["raised", "died", "hung", "refused"]

_FOLLOWER_KINDS = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError"})
_FOLLOWER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "Wait timeout",
    "connectFullMesh failed",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "NCCL error",
)
"""What gloo, nccl and the stores say when another rank is gone (observed on torch 2.13)."""

_COLLECTIVE = re.compile(r"[/\\]torch[/\\]distributed[/\\]")
# Where collectives and groups are made: what they raise is about ranks, not about a style.
_GROUPS = re.compile(
    r"[/\\]torch[/\\]distributed[/\\](?:distributed_c10d|c10d_logger|rendezvous|_functional)"
)
# Where the checker calls a style of the case's file. What torch raises below it is about how the
# file calls torch, which is the file's to mend: an error, never a style that does not fit.
_OWN_STYLE = re.compile(r"[/\\]spmd_verify[/\\]styles[/\\]user\.py$")
# Before a style has done a step of its own, what torch raises on every rank is a refusal.
_EARLY = ("building the free run", "step 0 of the free run")
_ENFORCE = re.compile(r"EnforceNotMet.*?enforce fail at [^\]]*\] (?P<what>[^\n]*?)\.?\n", re.DOTALL)
_STACK_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_STACK_HEAD = re.compile(r"^(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+) ")


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


class RankEnd(msgspec.Struct, frozen=True):
    """How one rank's part of a job ended, or that it has not.

    Attributes:
        rank: The rank.
        order: Position of its end among all ends of the job; ranks without one come last.
        event: What it sent last, if it sent a final event.
        exit_code: Its exit code if it died without a final event; negative for a signal.
        is_done: Whether it returned a result.
        last_note: What it said it was doing.
        stack: Innermost frame first; only of ranks that were alive at the time limit.
        log_tail: The last lines of its log.
    """

    rank: int
    order: int
    event: Raised | Refused | None = None
    exit_code: int | None = None
    is_done: bool = False
    last_note: str | None = None
    stack: list[Frame] | None = None
    log_tail: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a job has no result.

    Attributes:
        kind: `raised`, `died`, `hung` or `refused`.
        ranks: The ranks that are the cause.
        message: The whole story in a few sentences, without the slug.
        reason: The cause alone, in one line.
        slug: The error's slug.
        error: What the root cause raised, or None.
        followers: Ranks that only failed because of `ranks`.
    """

    kind: FailureKind
    ranks: list[int]
    message: str
    reason: str
    slug: str
    error: Raised | None = None
    followers: list[int] = []

    def reraise(self) -> NoReturn:
        """Raise in the controller what the job raised in a worker.

        Raises:
            SpmdVerifyError: Of the class it had there; `RankError` for anything else.
        """
        error = self.error
        kind = None if error is None else getattr(errors, error.kind, None)
        if error is not None and error.slug is not None and kind is not None:
            raise kind(error.message, slug=error.slug, detail=error.detail)
        detail = "" if error is None else error.traceback
        raise errors.RankError(self.message, slug=self.slug, detail=detail)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame in the user's code; `frames` has the innermost first."""
    return next((frame for frame in frames if is_user_file(frame.file)), None)


def is_follower(event: Raised) -> bool:
    """Say whether an exception only reports that another rank is gone or late."""
    if event.kind in _FOLLOWER_KINDS:
        return True
    return event.kind == "RuntimeError" and any(text in event.message for text in _FOLLOWER_TEXTS)


def is_in_collective(frames: Sequence[Frame]) -> bool:
    """Say whether a stack is inside torch.distributed, below any code of the user."""
    for frame in frames:
        if _COLLECTIVE.search(frame.file):
            return True
        if is_user_file(frame.file):
            return False
    return False


def is_parallel_style(path: str) -> bool:
    """Say whether a source file is of torch's parallel styles: fully_shard, DTensor, pipelining."""
    return bool(_COLLECTIVE.search(path)) and not _GROUPS.search(path)


def is_refusal(frames: Sequence[Frame]) -> bool:
    """Say whether a parallel style of torch raised, and no style of the case's file called it.

    Args:
        frames: Of the exception, innermost first.
    """
    is_own = any(_OWN_STYLE.search(frame.file) for frame in frames)
    return bool(frames) and is_parallel_style(frames[0].file) and not is_own


def parse_stack(text: str, thread: int) -> list[Frame]:
    """Read one thread's stack, innermost frame first, from what faulthandler wrote."""
    frames: list[Frame] = []
    is_wanted = False
    for line in text.splitlines():
        head = _STACK_HEAD.match(line)
        if head:
            is_wanted = int(head["thread"], 16) == thread
            if is_wanted:
                frames = []
        found = _STACK_LINE.match(line) if is_wanted else None
        if found:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return frames


def diagnose(
    ends: Sequence[RankEnd], *, seconds: float, is_timeout: bool, log_base: str
) -> Failure:
    """Name the root cause of a job that did not finish on every rank.

    Args:
        ends: One per rank.
        seconds: How long the job ran.
        is_timeout: Whether the controller stopped it at its time limit.
        log_base: Path of the rank logs without `<rank>.log`, for the message.

    Returns:
        The failure; followers are the ranks that neither caused it nor finished.
    """
    ordered = sorted(ends, key=lambda end: end.order)
    for end in ordered:
        if isinstance(end.event, Refused):
            return _refused(end, end.event, ends)
        if isinstance(end.event, Raised) and not is_follower(end.event):
            return _raised(end, end.event, ends, log_base)
        if end.exit_code is not None:
            return _died(end, ends, seconds, log_base)
    if is_timeout:
        return _hung(ends, seconds, log_base)
    first = next(end for end in ordered if isinstance(end.event, Raised))
    assert isinstance(first.event, Raised)
    return _raised(first, first.event, ends, log_base)


def _refused(end: RankEnd, event: Refused, ends: Sequence[RankEnd]) -> Failure:
    """Build the failure of a style that does not take the case."""
    ranks = [other.rank for other in ends if isinstance(other.event, Refused)]
    return Failure("refused", ranks or [end.rank], event.reason, event.reason, event.slug)


def _raised(end: RankEnd, event: Raised, ends: Sequence[RankEnd], log_base: str) -> Failure:
    """Build the failure of a rank that raised; ranks with the same message count as one."""
    ranks = [other.rank for other in ends if _same_error(other.event, event)]
    where = "" if event.where is None else f" at {event.where}"
    text = event.message.strip().rstrip(".") or "no message"
    reason = f"{event.kind}{where}: {text.splitlines()[0]}"
    is_everywhere = len(ranks) == len(ends)
    if event.is_torchs and event.slug is None and is_everywhere and end.last_note in _EARLY:
        refused = f"torch refuses this style{_during(end)}, on every rank. {reason}"
        return Failure("refused", ranks, refused, refused, "torch-refuses")
    slug = event.slug or "rank-raised"
    followers = _followers(ends, ranks)
    message = (
        f"{_name(ranks, len(ends))} raised {event.kind}{where}{_during(end)}: {text}."
        f"{_tell(followers, 'stopped because of it')} {_log(end, log_base)}"
    )
    return Failure("raised", ranks, message, reason, slug, event, followers)


def _died(end: RankEnd, ends: Sequence[RankEnd], seconds: float, log_base: str) -> Failure:
    """Build the failure of a rank whose process ended without a word."""
    assert end.exit_code is not None
    followers = _followers(ends, [end.rank])
    how = _exit_text(end.exit_code)
    why = ""
    if end.exit_code == -signal.SIGKILL:
        why = (
            " Signal 9 without our timeout usually means that the machine ran out of memory;"
            " run this cell alone."
        )
    elif end.exit_code == -signal.SIGABRT:
        found = _ENFORCE.search(end.log_tail)
        if found:
            why = f" The ranks disagree about a collective's size or dtype ({found['what']})."
    reason = f"{_name([end.rank], len(ends))} {how}{_during(end)}"
    message = (
        f"{_name([end.rank], len(ends))} stopped before answering: {how} after {seconds:.1f} s"
        f"{_during(end)}.{_tell(followers, 'waited for it and stopped')}{why}"
        f" {_log(end, log_base)}"
    )
    return Failure("died", [end.rank], message, reason, "rank-died", None, followers)


def _hung(ends: Sequence[RankEnd], seconds: float, log_base: str) -> Failure:
    """Build the failure of a job over its time limit: who is not waiting for another rank."""
    alive = [end for end in ends if not end.is_done and end.event is None]
    stuck = [end for end in alive if not is_in_collective(end.stack or [])]
    all_wait = not stuck
    culprits = alive if all_wait else stuck
    ranks = [end.rank for end in culprits]
    places = "; ".join(_place(end) for end in culprits)
    followers = _followers(ends, ranks)
    name = _name(ranks, len(ends))
    reason = f"{name} gave no answer within {seconds:.1f} s: {places}"
    hint = (
        " Every rank waits in a collective, so the ranks do not agree on the next one."
        if all_wait
        else ""
    )
    message = (
        f"{reason}.{hint}{_tell(followers, 'waited for it and stopped')}"
        " If the step is only slow, raise --timeout."
        f" {_log(culprits[0] if culprits else ends[0], log_base)}"
    )
    return Failure("hung", ranks, message, reason, "rank-hung", None, followers)


def _place(end: RankEnd) -> str:
    """Say where a rank was when it was stopped, by its user line where there is one."""
    during = "" if end.last_note is None else f" in {end.last_note}"
    if not end.stack:
        return f"rank {end.rank}{during} did not even answer the request for its stack"
    frame = user_frame(end.stack) or end.stack[0]
    return f"rank {end.rank}{during} is at {frame.file}:{frame.line} in {frame.function}"


def _same_error(event: Raised | Refused | None, other: Raised) -> bool:
    """Say whether two ranks raised the same."""
    return isinstance(event, Raised) and (
        (event.kind, event.message, event.where) == (other.kind, other.message, other.where)
    )


def _followers(ends: Sequence[RankEnd], causes: Sequence[int]) -> list[int]:
    """List the ranks that neither caused the failure nor finished."""
    return [end.rank for end in ends if end.rank not in causes and not end.is_done]


def _name(ranks: Sequence[int], num_ranks: int) -> str:
    """Name ranks in a sentence: `Rank 1 of 2`, `Ranks 0, 1 of 2`."""
    listed = ", ".join(str(rank) for rank in ranks)
    return f"Rank{'s' if len(ranks) > 1 else ''} {listed} of {num_ranks}"


def _tell(followers: Sequence[int], what: str) -> str:
    """Say what became of the followers, or nothing when there are none."""
    if not followers:
        return ""
    listed = ", ".join(str(rank) for rank in followers)
    return f" Rank{'s' if len(followers) > 1 else ''} {listed} {what}."


def _during(end: RankEnd) -> str:
    """Say what the rank had announced last."""
    return "" if end.last_note is None else f" during {end.last_note}"


def _log(end: RankEnd, log_base: str) -> str:
    """Say where the rank's output is."""
    return f"Worker output: {log_base}{end.rank}.log"


def _exit_text(exit_code: int) -> str:
    """Say how a process ended."""
    if exit_code >= 0:
        return f"left with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-exit_code} ({name})"
