"""Slices and splits: every rank keeps what it owns of each piece, no data moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from spmd.layout import Partial, Shard, chunk_units
from spmd.rules.base import Call, Candidate, DimRule, Rule, rule
from spmd.rules.views import SELF, plain

aten = torch.ops.aten


@rule(aten.select_backward.default, aten.slice_backward.default)
def _cut_backward(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    dim = call.argument("dim") % out.dim()
    labels = [None if i == dim else i for i in range(out.dim())]
    grads = (
        labels
        if call.target == aten.slice_backward.default
        else [i for i in labels if i is not None]
    )

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(out.shape), layouts[0])

    if call.target == aten.slice_backward.default:
        return SliceBackward([grads], [labels], linear=SELF, local_args=local)
    return plain([grads], [labels], local)


def cut(placement: Shard, start: int, end: int) -> Shard | None:
    """Return the split of elements [start, end) of a split dim, if each rank keeps its own."""
    total = sum(placement.units)
    if placement.outer > 1:
        if start % total or end % total or start == end:
            return None
        return Shard(placement.dim, placement.units, (end - start) // total)
    units = []
    for begin, size in zip(placement.offsets(), placement.units, strict=True):
        units.append(max(0, min(end, begin + size) - max(start, begin)))
    return Shard(placement.dim, tuple(units))


def local_bounds(placement: Shard, start: int, end: int) -> tuple[list[int], list[int]]:
    """Return, per rank, where elements [start, end) of the dim begin and end locally."""
    total = sum(placement.units)
    if placement.outer > 1:
        return (
            [start // total * n for n in placement.units],
            [end // total * n for n in placement.units],
        )
    starts, ends = [], []
    for begin, size in zip(placement.offsets(), placement.units, strict=True):
        starts.append(min(max(start - begin, 0), size))
        ends.append(min(max(end - begin, 0), size))
    return starts, ends


def _clamped(index: int | None, size: int, default: int) -> int:
    if index is None:
        return default
    return min(max(index + size if index < 0 else index, 0), size)


class Pieces(Rule):
    """Slices along one dim: every rank keeps what it owns of each piece.

    Args:
        dim: The dim that is cut.
        bounds: [start, end) of every piece, global; steps of 1.
        single: Whether the result is one tensor rather than a list.
    """

    def __init__(self, dim: int, bounds: list[tuple[int, int]], single: bool) -> None:
        self.dim, self.bounds, self.single = dim, bounds, single

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the placements as they are, cut where they split the dim."""
        for placement in placements[0]:
            if isinstance(placement, Shard) and placement.dim == self.dim:
                parts = [cut(placement, a, b) for a, b in self.bounds]
                if all(p is not None for p in parts):
                    yield Candidate((placement,), tuple(p for p in parts if p is not None))
            elif isinstance(placement, Shard | Partial):
                yield Candidate((placement,), (placement,) * len(self.bounds))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit one slice per piece with the rank's own bounds."""
        source = emitter.inputs[0]
        pieces = []
        for start, end in self.bounds:
            low: Any = start
            high: Any = end
            for axis, placement in enumerate(source.placements):
                if isinstance(placement, Shard) and placement.dim == self.dim:
                    lows, highs = local_bounds(placement, start, end)
                    low, high = emitter.pick(axis, lows), emitter.pick(axis, highs)
            pieces.append(emitter.call(aten.slice.Tensor, (args[0], self.dim, low, high), {}))
        return pieces[0] if self.single else pieces


@rule(aten.slice.Tensor)
def _slice(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % x.dim()
    size = x.shape[dim]
    start = _clamped(call.argument("start"), size, 0)
    end = max(start, _clamped(call.argument("end"), size, size))
    if call.argument("step") == 1:
        return Pieces(dim, [(start, end)], single=True)
    labels = [None if i == dim else i for i in range(x.dim())]
    return plain([labels], [labels])


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk, aten.unsafe_split,
    aten.unsafe_split_with_sizes,
)  # fmt: skip
def _split(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % x.dim()
    sizes = [o.shape[dim] for o in call.outputs if o is not None]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return Pieces(dim, [(e - n, e) for e, n in zip(ends, sizes, strict=True)], single=False)


class SliceBackward(DimRule):
    """Zeros around the gradient of a slice; along the cut dim each rank pads its own part."""

    def _bounds(self, call: Call) -> tuple[int, int, int, int]:
        out = call.outputs[0]
        assert out is not None
        dim = call.argument("dim") % out.dim()
        size = out.shape[dim]
        start = _clamped(call.argument("start"), size, 0)
        end = max(start, _clamped(call.argument("end"), size, size))
        return dim, size, start, end

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the free dims, and the cut dim where the gradient's split is a cut of one."""
        yield from super().candidates(call, placements, num_ranks)
        if call.argument("step") != 1:
            return
        dim, size, start, end = self._bounds(call)
        for placement in placements[0]:
            if isinstance(placement, Shard) and placement.dim == dim:
                whole = self._whole(placement, size, start, end, num_ranks)
                if whole is not None:
                    yield Candidate((placement,), (whole,))

    def _whole(self, part: Shard, size: int, start: int, end: int, ranks: int) -> Shard | None:
        guesses = [Shard(part.dim, chunk_units(size, ranks))]
        if part.outer == 1:
            total = sum(part.units)
            if total and size % total == 0:
                guesses.append(Shard(part.dim, part.units, size // total))
            units = list(part.units)
            units[0] += start
            units[-1] += size - end
            guesses.append(Shard(part.dim, tuple(units)))
        # Each guess is checked: only a split whose cut is exactly this part is used.
        return next((g for g in guesses if cut(g, start, end) == part), None)

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Pad along the cut dim where it is split, else call the operator."""
        dim, _, start, end = self._bounds(call)
        out = call.outputs[0]
        assert out is not None
        for axis, placement in enumerate(layouts[0].placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                lows, highs = local_bounds(placement, start, end)
                sizes = placement.local_sizes()
                left = emitter.pick(axis, lows)
                right = emitter.pick(axis, [n - h for n, h in zip(sizes, highs, strict=True)])
                pad = [0] * (2 * (out.dim() - dim - 1)) + [left, right]
                return emitter.call(aten.constant_pad_nd.default, (args[0], pad), {})
        return super().emit(emitter, call, args, kwargs, layouts)
