"""The boundaries of a step's modules in the direction in which values or gradients flow.

Torch-free, and runs nothing: what the search for a fault (`bisection`) asks of their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from spmd_verify.record import ROOT, Row
from spmd_verify.runner.specs import Boundary

# Findings of boundaries that are fed wherever they are in front of the place that is tried.
KNOWN: Final = ("right", "wrong")


@dataclass
class Flow:
    """All boundaries in order.

    Attributes:
        direction: `values` or `gradients`.
        boundaries: In the direction of flow; a *place* is an index of it.
        scale: What gradients are a multiple of the reference's by, see `specs.FeedingPlan`.
    """

    direction: str
    boundaries: list[Boundary]
    scale: float = 1.0

    @property
    def is_forward(self) -> bool:
        """Say whether values flow."""
        return self.direction == "values"

    def is_wrong(self, boundary: Boundary) -> bool:
        """Say whether a boundary differs and should not: what the model returns even in doubt."""
        is_returned = boundary.module == ROOT and not boundary.is_input
        return boundary.finding == "wrong" or (is_returned and boundary.finding == "doubtful")

    def is_solid(self, place: int) -> bool:
        """Say whether a boundary and all before it that matters can be fed."""
        return self.boundaries[place].finding in KNOWN and place < self.first_open

    @cached_property
    def first_open(self) -> int:
        """Return the first boundary in doubt that the module around never recovers from.

        A summand is one too. One that is followed by what is right does not matter (a summand
        without its bias, heads in another order), nor one in a module that can be fed where it
        is left.
        """
        last_right: dict[str, int] = {}
        last_exit: dict[str, int] = {}
        for i, boundary in enumerate(self.boundaries):
            if boundary.finding == "right":
                last_right |= dict.fromkeys(_around(boundary.module), i)
            if boundary.finding in KNOWN and boundary.is_input != self.is_forward:
                last_exit[boundary.module] = i
        for i, boundary in enumerate(self.boundaries):
            around = _parent(boundary.module)
            exits = (last_exit.get(module, -1) for module in _around(around) if module != ROOT)
            recovered = max(last_right.get(around, -1), *exits, -1)
            if boundary.finding in ("doubtful", "summand") and recovered < i:
                return i
        return len(self.boundaries)

    def module_at(self, place: int) -> str:
        """Return the smallest module that contains what lies in front of a boundary.

        Between it and the nearest boundary in the direction against the flow that is right or
        was fed in.
        """
        before = self.before(place)
        here = self.boundaries[place]
        if before is None:
            return here.module if here.is_input != self.is_forward else ROOT
        if here.finding == "summand" and before.module == here.module:
            # Who should have summed it: the module, or what contains it.
            parent = _parent(here.module)
            return here.module if parent == ROOT else _common(parent, parent, self.modules)
        earlier, later = (before, here) if self.is_forward else (here, before)
        return _common(
            earlier.module if earlier.is_input else _parent(earlier.module),
            _parent(later.module) if later.is_input else later.module,
            self.modules,
        )

    def before(self, place: int) -> Boundary | None:
        """Return the last boundary before a place that is right or was fed in."""
        solid = (self.boundaries[i] for i in range(place)[::-1] if self.is_solid(i))
        return next(solid, None)

    @cached_property
    def modules(self) -> set[str]:
        """Return the modules that have boundaries."""
        return {boundary.module for boundary in self.boundaries}

    @cached_property
    def _first_of(self) -> dict[str, int]:
        """Return the first place of every module."""
        found: dict[str, int] = {}
        for i, boundary in enumerate(self.boundaries):
            found.setdefault(boundary.module, i)
        return found

    def is_upstream(self, row: Row, place: int) -> bool:
        """Say whether a gradient is computed from the one at a place: its module was left there.

        Of a shared parameter all uses must be.
        """
        is_exit = not self.boundaries[place].is_input
        for name in (row.name, *row.aliases):
            owner = self.owner(name)
            first = self._first_of.get(owner, -1)
            if owner == ROOT or first < place or (first == place and not is_exit):
                return False
        return True

    def owner(self, name: str) -> str:
        """Return the innermost module with boundaries that has a parameter."""
        known = self.modules
        path = name.rpartition(".")[0]
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path or ROOT


def side(boundary: Boundary) -> str:
    """Return where a boundary is, `input of blocks.0`."""
    return f"{'input' if boundary.is_input else 'output'} of {boundary.module}"


def _parent(module: str) -> str:
    """Return the path above a module's; the root for one of its own."""
    return module.rpartition(".")[0] or ROOT


def _around(module: str) -> list[str]:
    """Return a module and all that contain it."""
    parts = module.split(".")
    return [ROOT, *(".".join(parts[:n]) for n in range(1, len(parts) + 1))]


def _common(left: str, right: str, known: set[str]) -> str:
    """Return the innermost module with boundaries that contains two."""
    if ROOT in (left, right):
        return ROOT
    shared: list[str] = []
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    while shared and ".".join(shared) not in known:
        shared.pop()
    return ".".join(shared) or ROOT
