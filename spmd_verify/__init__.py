"""Differential checker: one device against every parallel style.

Importing this package imports neither torch nor any of its own heavy modules; names are
resolved when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd_verify.cases.hooks import Case as Case
    from spmd_verify.options import Options as Options
    from spmd_verify.record import Record as Record
    from spmd_verify.recorder import record as record

_HOME = {
    "Case": "spmd_verify.cases.hooks",
    "Options": "spmd_verify.options",
    "Record": "spmd_verify.record",
}

__all__ = ["Case", "Options", "Record", "record"]


def __getattr__(name: str) -> Any:
    """Import the home of a public name on first use."""
    if name == "record":  # a module that can be called, see there
        return import_module("spmd_verify.record")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'spmd_verify' has no attribute {name!r}")
