"""Lookups of rows: positions and columns are free, rows split over ranks add up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from spmd import runtime
from spmd.layout import REPLICATE, Partial, Shard
from spmd.rules.base import Call, Candidate, DimRule, Rule, rule

aten = torch.ops.aten


def _splits_rows(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim == 0 and placement.outer == 1


class _Embedding(DimRule):
    """A rank that has some of the rows looks up those and has zeros for the others."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the free dims, and the rows as a partial sum."""
        yield from super().candidates(call, placements, num_ranks)
        for placement in placements[0]:
            if _splits_rows(placement):
                yield Candidate((placement, REPLICATE), (Partial("sum"),))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the lookup, among this rank's own rows where they are split."""
        rows = call.operands[0].shape[0]
        for axis, placement in enumerate(emitter.inputs[0].placements):
            if _splits_rows(placement):
                first = emitter.pick(axis, placement.offsets())
                return emitter.call(runtime.own_rows, (args[0], args[1], first, rows), {})
        return super().emit(emitter, call, args, kwargs, layouts)


@rule(aten.embedding.default)
def _embedding(call: Call) -> Rule:
    index = call.operands[1]
    free = [f"i{d}" for d in range(index.dim())]
    return _Embedding([[None, "d"], free], [[*free, "d"]], linear=(frozenset((0,)),))


class _EmbeddingBackward(DimRule):
    """Where the weight lives by rows, a rank makes the gradient of its own ones."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the free dims, and the rows that the finished gradient is wanted in."""
        yield from super().candidates(call, placements, num_ranks)
        for placement in () if call.gradient is None else call.gradient.placements:
            if _splits_rows(placement) and len(placement.units) == num_ranks:  # type: ignore[union-attr]
                yield Candidate((REPLICATE, REPLICATE), (placement,))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the sum over positions, of this rank's own rows where they are split."""
        for axis, placement in enumerate(layouts[0].placements):
            if _splits_rows(placement):
                first = emitter.pick(axis, placement.offsets())
                own = emitter.pick(axis, placement.units)
                padding = call.argument("padding_idx")
                return emitter.call(
                    runtime.own_rows_backward, (args[0], args[1], first, own, padding), {}
                )
        return super().emit(emitter, call, args, kwargs, layouts)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule:
    index = call.operands[1]
    if call.argument("scale_grad_by_freq"):
        # Counts over the whole batch divide each row: no part knows them.
        return DimRule([[None] * index.dim() + ["d"], [None] * index.dim()], [[None, "d"]])
    free = [f"i{d}" for d in range(index.dim())]
    return _EmbeddingBackward(
        [[*free, "d"], free], [[None, "d"]], dict.fromkeys(free, "sum"), (frozenset((0,)),)
    )
