"""What torch refuses: its exceptions under a wrapper, told from failing user code.

A step that ran on this rank's part of the batch without the wrapper, and raises with it, is
one that the style does not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

import torch.distributed as dist

from spmd_verify.errors import CaseError, SpmdVerifyError, Unsupported
from spmd_verify.user_code import one_line

# gloo's own files in its messages: another rank is gone or late, which is its story to tell.
_BACKEND: Final = "/gloo/"
_LONGEST: Final = 300  # characters of torch's message that a table's footnote can hold


@contextmanager
def torch_refuses(style: str, doing: str) -> Iterator[None]:
    """Turn what torch raises into a refusal of the style.

    Args:
        style: Its id.
        doing: What is tried, for the message.

    Raises:
        Unsupported: `torch-refuses`, with torch's reason in one line.
    """
    try:
        yield
    except CaseError as error:  # a hook of the file that one device took
        raise refusal(style, doing, error.__cause__ or error) from error
    except (SpmdVerifyError, dist.DistError):
        raise
    except Exception as error:
        if _BACKEND in str(error):
            raise
        raise refusal(style, doing, error) from error


def refusal(style: str, doing: str, error: BaseException) -> Unsupported:
    """Return the refusal that an exception amounts to."""
    reason = " ".join(one_line(error).split())
    if len(reason) > _LONGEST:
        reason = f"{reason[:_LONGEST].rstrip()}..."
    place = _place(error.__traceback__)
    return Unsupported(
        f"{style} does not take this case: {doing} raises{place} what one device does not. "
        f"{reason}",
        slug="torch-refuses",
    )


def _place(trace: TracebackType | None) -> str:
    """Return ` at file:line` of the innermost frame outside torch and the checker."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not any(part in file for part in ("/torch/", "/spmd_verify/", "/contextlib.py")):
            place = f" at {file.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
