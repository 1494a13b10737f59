"""Files that are written whole or not at all. Torch-free."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from spmd_verify.errors import UsageError


def write_whole(path: str, content: bytes) -> None:
    """Write a file in one step, so that a kill leaves the old one.

    Args:
        path: In a folder that exists.
        content: All of it.

    Raises:
        UsageError: `report-not-written`.
    """
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        raise UsageError(
            f"Cannot write the report: {path!r}. Got {error.strerror}. Name a file in a folder "
            f"that exists and can be written",
            slug="report-not-written",
        ) from error
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
