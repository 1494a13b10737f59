"""Joins: cat and stack keep splits of other dims, and of the joined dim where they can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from spmd.layout import Shard
from spmd.rules.base import Call, Candidate, DimRule, Rule, rule

aten = torch.ops.aten


class Join(Rule):
    """cat along a dim: other dims are free; equal splits of the joined dim repeat."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield splits of other dims, and of the joined dim where no data moves."""
        ndim = call.outputs[0].dim()  # type: ignore[union-attr]
        labels = [[None if i == self.dim else i for i in range(ndim)]]
        inputs = [labels[0] if x.dim() == ndim else [None] * x.dim() for x in call.operands]
        together = [frozenset(range(len(call.operands)))]
        yield from DimRule(inputs, labels, linear=together).candidates(call, placements, num_ranks)
        joined = self._joined(call, placements)
        if joined is not None:
            yield joined

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Join what there is: parts may be empty one by one."""
        return emitter.call(call.target, args, kwargs)

    def _joined(self, call: Call, placements: Any) -> Candidate | None:
        parts: list[Shard] = []
        for forms in placements:
            part = next((p for p in forms if isinstance(p, Shard) and p.dim == self.dim), None)
            if part is None:
                return None
            parts.append(part)
        first = parts[0]
        if all(p.units == first.units for p in parts):
            outer = sum(p.outer for p in parts)
            return Candidate(tuple(parts), (Shard(self.dim, first.units, outer),))
        last = -1
        for part in parts:
            ranks = [r for r, n in enumerate(part.units) if n]
            if part.outer != 1 or (ranks and ranks[0] < last):
                return None
            last = ranks[-1] if ranks else last
        units = tuple(sum(p.units[r] for p in parts) for r in range(len(first.units)))
        return Candidate(tuple(parts), (Shard(self.dim, units),))


@rule(aten.cat.default)
def _cat(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    return Join(call.argument("dim") % max(out.dim(), 1))


@rule(aten.stack.default)
def _stack(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    dim = call.argument("dim") % out.dim()
    inner = list(range(out.dim() - 1))
    output: list[Any] = list(inner)
    output.insert(dim, None)
    together = [frozenset(range(len(call.operands)))]
    return DimRule([inner] * len(call.operands), [output], linear=together)
