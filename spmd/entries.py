"""What a compiled step keeps: its options, its captures, its partitioned programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from spmd.layout import Layout
from spmd.mode import ParallelMode
from spmd.overrides import Override
from spmd.program import Program


@dataclass
class Options:
    """The arguments of `compile`, see there."""

    mode: ParallelMode
    overrides: list[Override] = field(default_factory=list)
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    batch: str = "local"
    strict: bool = False
    dump_graphs: str | None = None
    recapture_every: int | None = None


# Executables kept for one set of shapes where data-dependent sizes differ: each costs its
# graph, and a call whose sizes are new tries all of them first.
LARGEST_ENTRY = 8
CAPTURE = -1
FAILED = -2


@dataclass(eq=False)
class Executable:
    """A program partitioned for the mesh, ready to run.

    Attributes:
        program: What was captured.
        graph: The local graph.
        inputs: Layout of every input.
        outputs: Layout of every output.
        serial: Number that names it on every rank.
    """

    program: Program
    graph: fx.GraphModule
    inputs: list[Layout]
    outputs: list[Layout]
    serial: int = 0


@dataclass(eq=False)
class Entry:
    """What is known for one set of shapes, arguments and flags.

    Attributes:
        shapes: Position of an argument -> its global shape, where the ranks hold parts.
        parts: Position of an argument -> where its parts lie.
        own: Position of an argument -> the part of it that this rank's step is about.
        fingerprint: Of the newest capture.
        stable: Whether two captures in a row agreed.
        executables: Newest first; more than one where data-dependent sizes differ.
        calls: Calls answered by this entry.
    """

    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[int, Layout] = field(default_factory=dict)
    own: dict[int, Layout] = field(default_factory=dict)
    fingerprint: str = ""
    stable: bool = False
    executables: list[Executable] = field(default_factory=list)
    calls: int = 0


class CaptureCache:
    """Programs shared by several compiled copies of one step, by call number.

    The copies must be built alike; the step's Python runs for the first of them only. Programs
    that go by slots of the model they were captured with are not shared (`Program.is_portable`).
    """

    def __init__(self) -> None:
        self.programs: dict[Any, Program] = {}
