"""The border between our code and the user's: whatever theirs raises becomes one clear error.

Torch-free. Our own errors pass through; `KeyboardInterrupt` and `SystemExit` do too.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from types import TracebackType

from spmd_verify.errors import CaseError, SpmdVerifyError

_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN_FOLDERS = tuple(os.path.join(_PACKAGES, name) + os.sep for name in ("spmd", "spmd_verify"))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")


class UserCode:
    """Context in which the user's code runs.

    An exception that leaves it is raised again as `kind`, with the user's traceback from
    their own file on as `detail`.
    """

    def __init__(
        self,
        doing: str,
        *,
        path: str,
        slug: str,
        remedy: str | Callable[[], str] = "",
        kind: type[CaseError] = CaseError,
    ) -> None:
        """Say what is being done, in words that complete `<doing> failed`.

        Args:
            doing: For example "forward of the model on one device".
            path: The user's file, or the address where there is no file.
            slug: Heading in `docs/errors.md`.
            remedy: Last sentence of the message, or what finds it; asked for on failure only.
            kind: Class of the error raised.
        """
        self.doing = doing
        self.path = path
        self.slug = slug
        self.remedy = remedy
        self.kind = kind

    def __enter__(self) -> "UserCode":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, SpmdVerifyError):
            return
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy()
        raise self.kind(
            f"{self.doing} failed: {self.path}. Got {one_line(error)}"
            + (f". {remedy}" if remedy else ""),
            slug=self.slug,
            detail=user_traceback(error, self.path),
            fields={"error": type(error).__name__},
        ) from error


def one_line(error: BaseException) -> str:
    """Return `TypeName: first line of the message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_user_file(path: str) -> bool:
    """Say whether a source file is the user's: not torch, Python's, or ours."""
    if path.startswith("<") or path.startswith(_OWN_FOLDERS) or _TORCH.search(path):
        return False
    return bool(_SITE.search(path)) or not path.startswith(_STDLIB)


def user_traceback(error: BaseException, path: str) -> str:
    """Format a traceback from the first frame of the user's file on.

    Args:
        error: With its traceback attached.
        path: The user's file. Where no frame is in it, our own frames are dropped instead.

    Returns:
        The text of the traceback, without a final newline.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    file = os.path.abspath(path)
    at_user = (i for i, frame in enumerate(frames) if os.path.abspath(frame.filename) == file)
    first = next(at_user, None)
    if first is None:
        shown = [frame for frame in frames if "/spmd_verify/" not in frame.filename]
    else:
        shown = frames[first:]
    lines = ["Traceback (from your file on):\n"] if shown else []
    lines += traceback.format_list(shown) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
