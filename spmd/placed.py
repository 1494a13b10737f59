"""A distributed value as this process holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd.layout import Layout


@dataclass(frozen=True)
class Placed:
    """The local parts of one global tensor.

    Attributes:
        local: One tensor per rank this process stands for: one in a rank's process, one
            per rank of the mesh in lock-step. Numbers stand where the step returned one.
        layout: Where the parts lie.
    """

    local: list[Any]
    layout: Layout
