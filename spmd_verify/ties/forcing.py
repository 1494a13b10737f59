"""Decide near ties as the reference did, wherever a style comes to them.

A rank holds any part of a batch, so a row is told by the operator and its content: no value
further from the reference's than the noise allows. Where such a row is decided otherwise than
in the reference, the operator runs on the reference's own values of it; nothing else changes by
a bit. Local tensors; docs/design.md 3.10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, fx

from spmd_verify.record import Tie
from spmd_verify.ties.deciding import Call, call_of, is_deciding
from spmd_verify.ties.deciding_mode import DecidingMode

# Largest count of values compared to find the near ties of one call: about a second. A call of
# more is left as it is.
LARGEST_SEARCH: Final = 1 << 30


class NearTie(msgspec.Struct, frozen=True):
    """One row of a deciding operator whose decision is within its noise.

    Attributes:
        tie: How it is told.
        values: The reference's operands of the row, in its dtype, [operand][n].
        centre: The same in float64, [operand][n].
        tolerance: c times the noise of the row: a row is this one where no value is further
            from `centre`.
        positions: Elementwise: which values of the row are near ties.
        sides: What the reference decided: per position, or for the row; see `Decider.sides`.
    """

    tie: Tie
    values: list[list[float]]
    centre: list[list[float]]
    tolerance: float
    positions: list[int]
    sides: list[float]


def read_ties(path: str) -> list[NearTie]:
    """Return the near ties that a `TiesRequest` had written."""
    return msgspec.msgpack.decode(Path(path).read_bytes(), type=list[NearTie])


@dataclass(frozen=True)
class _Known:
    """Near ties of one operator whose rows have one length n; T of them.

    Attributes:
        indices: Their positions among all near ties, [T].
        values: [operands, T, n], float64.
        centre: [operands, T, n], float64.
        tolerances: [T].
        sides: Selecting: [T, m]. Elementwise: [T, n], NaN where a value is no near tie.
    """

    indices: list[int]
    values: Tensor
    centre: Tensor
    tolerances: Tensor
    sides: Tensor

    @classmethod
    def of(cls, found: Sequence[tuple[int, NearTie]]) -> _Known:
        """Stack near ties."""
        wide = torch.float64
        rows = []
        for _, near in found:
            sides = torch.tensor(near.sides, dtype=wide)
            if near.positions:
                sides = torch.full((len(near.values[0]),), math.nan, dtype=wide)
                sides[near.positions] = torch.tensor(near.sides, dtype=wide)
            rows.append(sides)
        return cls(
            [index for index, _ in found],
            torch.tensor([near.values for _, near in found], dtype=wide).transpose(0, 1),
            torch.tensor([near.centre for _, near in found], dtype=wide).transpose(0, 1),
            torch.tensor([near.tolerance for _, near in found], dtype=wide),
            torch.stack(rows),
        )

    def stretch(self, start: int, size: int) -> _Known:
        """Return the same of a stretch of every row, elementwise operators only."""
        part = slice(start, start + size)
        return replace(
            self,
            values=self.values[..., part],
            centre=self.centre[..., part],
            sides=self.sides[:, part],
        )

    def nearest(self, rows: Tensor) -> Tensor:
        """Return which near tie each row is, [R]: the closest within its tolerance, else -1.

        Args:
            rows: [operands, R, n], float64.
        """
        chosen = torch.full((rows.shape[1],), -1)
        if rows.numel() * len(self.indices) > LARGEST_SEARCH:
            return chosen
        apart = torch.stack(
            [
                torch.cdist(_bounded(row), _bounded(centre), p=math.inf)
                for row, centre in zip(rows, self.centre, strict=True)
            ]
        ).amax(0)
        apart = torch.where(apart <= self.tolerances, apart, math.inf)
        best, at = apart.min(dim=1)
        return torch.where(best < math.inf, at, chosen)


@dataclass
class Forcing:
    """The reference's decisions at near ties, for one process of a cell.

    Attributes:
        ties: All near ties of the case.
        flipped: Positions of those that were decided otherwise until forced.
    """

    ties: list[NearTie]
    flipped: set[int] = field(default_factory=set)
    _is_in_graph: bool = False
    _known: dict[tuple[str, int, str], list[_Known]] = field(default_factory=dict)
    _now: tuple[str, int] = ("", -1)

    def __post_init__(self) -> None:
        """Sort the ties by where they are met."""
        alike: dict[Any, list[tuple[int, NearTie]]] = {}
        for index, near in enumerate(self.ties):
            shape = (len(near.values), len(near.values[0]), not near.positions and len(near.sides))
            key = (near.tie.run, near.tie.step, near.tie.operator)
            alike.setdefault((key, shape), []).append((index, near))
        for (key, _), found in alike.items():
            self._known.setdefault(key, []).append(_Known.of(found))

    def applied(self, style: Any) -> Any:
        """Return a style whose graphs decide so; one without graphs needs `at` alone."""
        if not hasattr(style, "decisions"):
            return style
        self._is_in_graph = True
        return replace(style, decisions=self.rewritten)

    @contextmanager
    def at(self, run: str, step: int) -> Iterator[None]:
        """Return the context of one step of a run, or of the eval forward that follows it."""
        # Step 0 of the anchored run starts from the free run's state.
        self._now = (run if step else "free", step)
        if self._is_in_graph:
            yield
        else:
            with DecidingMode(self.choose):
                yield

    def rewritten(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Let the deciding operators of a local graph decide so, in place."""
        for node in graph.graph.nodes:
            if node.op == "call_function" and is_deciding(node.target):
                node.target = self._deciding(node.target)
        graph.recompile()
        return graph

    def _deciding(self, func: Any) -> Callable[..., Any]:
        """Return an operator that decides so."""

        def decide(*args: Any, **kwargs: Any) -> Any:
            call = call_of(func, args, kwargs)
            return func(*args, **kwargs) if call is None else call.decide(self.choose)

        return decide

    def choose(self, call: Call, rows: list[Tensor], sides: Tensor) -> list[Tensor] | None:
        """Return the rows with those of the reference where it decided otherwise, else None."""
        known = self._known.get((*self._now, call.name.partition(".")[0]), ())
        changed = None
        for each in known:
            if len(each.values) != len(rows):
                continue
            wide = torch.stack([row.detach().to(torch.float64) for row in changed or rows])
            size, whole = wide.shape[2], each.centre.shape[2]
            if call.decider.is_elementwise:
                for start in _starts(size, whole):
                    changed = self._elements(wide, sides, each.stretch(start, size)) or changed
            elif size == whole and each.sides.shape[1] == sides.shape[1]:
                changed = self._whole_rows(wide, sides, each) or changed
        return changed

    def _whole_rows(self, rows: Tensor, sides: Tensor, known: _Known) -> list[Tensor] | None:
        """Return rows with the reference's where a selecting operator picked otherwise.

        Args:
            rows: [operands, R, n], float64, changed in place.
            sides: [R, m].
            known: Near ties of the operator.
        """
        at = known.nearest(rows)
        flipped = (at >= 0) & (sides != known.sides[at]).any(1)
        return self._changed(rows, flipped[:, None], at, known)

    def _elements(self, rows: Tensor, sides: Tensor, known: _Known) -> list[Tensor] | None:
        """Return rows with the reference's values where one is on another side of a boundary.

        Args:
            rows: [operands, R, n], float64, changed in place.
            sides: [R, n].
            known: Near ties of the operator, or a stretch of them.
        """
        at = known.nearest(rows)
        due = known.sides[at]
        return self._changed(rows, (at >= 0)[:, None] & (due == due) & (sides != due), at, known)

    def _changed(
        self, rows: Tensor, flipped: Tensor, at: Tensor, known: _Known
    ) -> list[Tensor] | None:
        """Put the reference's values where decisions flipped; None where none did."""
        if not bool(flipped.any()):
            return None
        self.flipped |= {known.indices[tie] for tie in at[flipped.any(1)].tolist()}
        return list(torch.where(flipped, known.values[:, at], rows).unbind())


def _starts(size: int, whole: int) -> list[int]:
    """Return where a local row may begin in the reference's: parts are alike but for the last."""
    if size > whole:
        return []
    return sorted({*range(0, whole - size + 1, size), whole - size})


def _bounded(value: Tensor) -> Tensor:
    """Return a tensor with large numbers for infinities, so that equal ones are 0 apart."""
    return value.nan_to_num(nan=math.nan, posinf=1e300, neginf=-1e300)


def farthest(row: Tensor, centre: Tensor) -> Tensor:
    """Return the largest |row - centre| of each row, [R]; inf where infinities or NaN differ."""
    wide = row.to(torch.float64)
    error = torch.where(wide == centre, 0.0, (wide - centre).abs())
    return error.nan_to_num(nan=math.inf).amax(1)
