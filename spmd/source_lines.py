"""Lines of the user's code: which one runs now, and which one asked for a number."""

from __future__ import annotations

import sys
from functools import lru_cache

import torch

from spmd.errors import CaptureError

_SKIPPED_FOLDERS = (torch.__path__[0], __file__.rsplit("/", 1)[0], "<", "importlib")
_CONVERSIONS = frozenset(("__bool__", "__int__", "__float__", "__index__", "_try_item"))


@lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    return not filename.startswith(_SKIPPED_FOLDERS) and "contextlib.py" not in filename


def user_line() -> str | None:
    """Return "file:line" of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_users(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def refuse_user_control_flow() -> None:
    """Raise if the guard under evaluation was asked for by user code, not by torch.

    The conversions of torch's symbols (`SymFloat.__bool__` and its like) stand in the
    stack right below the code that asked.

    Raises:
        CaptureError: `control-flow-on-tensor`, with the user's line.
    """
    frame = sys._getframe(1)
    while frame is not None:
        in_torch = frame.f_code.co_filename.startswith(torch.__path__[0])
        if frame.f_code.co_name in _CONVERSIONS and in_torch:
            asked = frame.f_back
            if asked is not None and _is_users(asked.f_code.co_filename):
                raise control_flow_error(f"{asked.f_code.co_filename}:{asked.f_lineno}")
            return
        frame = frame.f_back  # type: ignore[assignment]


def control_flow_error(line: str | None) -> CaptureError:
    """Return the error for Python control flow on a tensor's value."""
    return CaptureError(
        "Python control flow depends on the value of a tensor, so one graph cannot stand "
        "for the step. Express the choice with tensor operators (torch.where, masks) or take "
        "the number from outside the step.",
        line,
        "control-flow-on-tensor",
    )
