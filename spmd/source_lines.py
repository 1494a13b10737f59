"""Lines of the user's code: which one runs now, and who asks for a number."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

import torch

from spmd.errors import CaptureError

_TORCH = torch.__path__[0]
_ENGINE = __file__.rsplit("/", 1)[0]
_SKIPPED_FOLDERS = (_TORCH, _ENGINE, "<", "importlib")
_CONVERSIONS = frozenset(("__bool__", "__int__", "__float__", "__index__", "_try_item"))


@lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    return not filename.startswith(_SKIPPED_FOLDERS) and "contextlib.py" not in filename


def user_line() -> str | None:
    """Return "file:line" of the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_users(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def refuse_user_control_flow() -> None:
    """Raise if the symbol under evaluation was converted by user code, not by a library.

    The conversions of torch's symbols (`SymFloat.__bool__` and its like) stand in the
    stack right below the code that asked.

    Raises:
        CaptureError: `control-flow-on-tensor`, with the user's line.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CONVERSIONS and frame.f_code.co_filename.startswith(_TORCH):
            _refuse_users(frame.f_back)
            return
        frame = frame.f_back


def refuse_users_question(name: str) -> None:
    """Raise if the code outside this package that called a function belongs to the user.

    Args:
        name: The function's; its own frames, where it is written in Python, do not count.

    Raises:
        CaptureError: `control-flow-on-tensor`, with the user's line.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        itself = code.co_name in (name, "handle_torch_function")
        itself = itself and code.co_filename.startswith(_TORCH)
        if not itself and not code.co_filename.startswith(_ENGINE):
            break
        frame = frame.f_back
    _refuse_users(frame)


def _refuse_users(frame: FrameType | None) -> None:
    """Libraries may ask: their answers guard the graph. What the user asks is refused."""
    if frame is None:
        return
    filename = frame.f_code.co_filename
    if _is_users(filename) and "site-packages" not in filename and "dist-packages" not in filename:
        raise noted(control_flow_error(f"{filename}:{frame.f_lineno}"))


_refused: list[CaptureError] = []


def noted(error: CaptureError) -> CaptureError:
    """Return `error`, and remember it in case the step's own `except` swallows it."""
    _refused.append(error)
    return error


@contextmanager
def refusals_kept() -> Iterator[None]:
    """Raise the first noted error at the end of the body, if the body itself did not."""
    _refused.clear()
    yield
    if _refused:
        raise _refused[0]


def control_flow_error(line: str | None) -> CaptureError:
    """Return the error for Python control flow on a tensor's value."""
    return CaptureError(
        "Python control flow depends on the value of a tensor, so one graph cannot stand "
        "for the step. Express the choice with tensor operators (torch.where, masks) or take "
        "the number from outside the step; a number for arithmetic or for the result comes "
        "from .item().",
        line,
        "control-flow-on-tensor",
    )
