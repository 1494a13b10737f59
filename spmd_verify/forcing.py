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
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from spmd_verify.deciding import Call, call_of, is_deciding
from spmd_verify.deciding_mode import DecidingMode
from spmd_verify.record import Tie


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
    """A near tie as tensors.

    Attributes:
        index: Its position among all near ties.
        values: [operands, n].
        centre: [operands, n], float64.
        sides: By position of the row elementwise; else of the row, [m].
    """

    index: int
    near: NearTie
    values: Tensor
    centre: Tensor
    sides: Tensor

    @classmethod
    def of(cls, index: int, near: NearTie) -> _Known:
        """Make the tensors."""
        wide = torch.float64
        return cls(
            index,
            near,
            torch.tensor(near.values, dtype=wide),
            torch.tensor(near.centre, dtype=wide),
            torch.tensor(near.sides, dtype=wide),
        )


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
        for index, near in enumerate(self.ties):
            key = (near.tie.run, near.tie.step, near.tie.operator)
            self._known.setdefault(key, []).append(_Known.of(index, near))

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
        known = [each for each in known if len(each.values) == len(rows)]
        if not known:
            return None
        wide = torch.stack([row.detach().to(torch.float64) for row in rows])
        if call.decider.is_elementwise:
            found = self._elements(call, wide, sides, known)
        else:
            found = self._whole_rows(wide, sides, known)
        return None if found is None else list(found.unbind())

    def _whole_rows(self, rows: Tensor, sides: Tensor, known: Sequence[_Known]) -> Tensor | None:
        """Return rows with the reference's where a selecting operator picked otherwise.

        Args:
            rows: [operands, R, n], float64.
            sides: [R, m].
            known: The near ties of the operator.
        """
        known = [each for each in known if each.centre.shape[1] == rows.shape[2]]
        known = [each for each in known if each.sides.shape[0] == sides.shape[1]]
        best = torch.full((rows.shape[1],), math.inf, dtype=torch.float64)
        chosen = torch.full((rows.shape[1],), -1)
        for position, each in enumerate(known):
            apart = torch.stack(
                [farthest(row, centre) for row, centre in zip(rows, each.centre, strict=True)]
            ).amax(0)
            is_closer = (apart <= each.near.tolerance) & (apart < best)
            best, chosen = (
                torch.where(is_closer, apart, best),
                chosen.masked_fill(is_closer, position),
            )
        changed = None
        for row in (chosen >= 0).nonzero()[:, 0].tolist():
            each = known[int(chosen[row])]
            if torch.equal(each.sides, sides[row]):
                continue
            changed = rows.clone() if changed is None else changed
            changed[:, row] = each.values
            self.flipped.add(each.index)
        return changed

    def _elements(
        self, call: Call, rows: Tensor, sides: Tensor, known: Sequence[_Known]
    ) -> Tensor | None:
        """Return rows with the reference's values where one is on another side of a boundary.

        Args:
            call: The call.
            rows: [operands, R, n], float64.
            sides: [R, n].
            known: The near ties of the operator.
        """
        positions = _Positions(known)
        widest = max(each.near.tolerance for each in known)
        margins = call.decider.margins(call, list(rows))
        changed = None
        for row, at in (margins <= 2.0 * widest).nonzero().tolist():
            found = positions.closest(rows[:, row], at)
            if found is None:
                continue
            each, which = found
            if float(each.sides[which]) == float(sides[row, at]):
                continue
            changed = rows.clone() if changed is None else changed
            changed[:, row, at] = each.values[:, each.near.positions[which]]
            self.flipped.add(each.index)
        return changed


class _Positions:
    """All positions of all near ties of an elementwise operator, for quick exclusion.

    Attributes:
        pairs: Near tie and index into its positions, P of them.
    """

    def __init__(self, known: Sequence[_Known]) -> None:
        """Lay the positions out."""
        self.pairs = [(each, i) for each in known for i in range(len(each.near.positions))]
        at = [each.near.positions[which] for each, which in self.pairs]
        self._positions = torch.tensor(at)
        self._sizes = torch.tensor([each.centre.shape[1] for each, _ in self.pairs])
        self._tolerances = torch.tensor(
            [each.near.tolerance for each, _ in self.pairs], dtype=torch.float64
        )
        values = [each.centre[:, i] for (each, _), i in zip(self.pairs, at, strict=True)]
        self._values = torch.stack(values, dim=1)  # [operands, P]

    def closest(self, row: Tensor, at: int) -> tuple[_Known, int] | None:
        """Return the near tie that position `at` of a local row is, and which of its positions.

        A local row may be any stretch of the reference's: the dim may be split.

        Args:
            row: [operands, n], float64.
            at: Position in the row.
        """
        size = row.shape[1]
        starts = self._positions - at
        is_near = (self._values - row[:, at, None]).abs().amax(0) <= self._tolerances
        fitting = is_near & (starts >= 0) & (starts + size <= self._sizes)
        found, best = None, math.inf
        for pair in fitting.nonzero()[:, 0].tolist():
            each, start = self.pairs[pair][0], int(starts[pair])
            apart = float(farthest(row, each.centre[:, start : start + size]).amax())
            if apart <= each.near.tolerance and apart < best:
                found, best = self.pairs[pair], apart
        return found


def farthest(row: Tensor, centre: Tensor) -> Tensor:
    """Return the largest |row - centre| of each row, [R]; inf where infinities or NaN differ."""
    wide = row.to(torch.float64)
    error = torch.where(wide == centre, 0.0, (wide - centre).abs())
    return error.nan_to_num(nan=math.inf).amax(1)
