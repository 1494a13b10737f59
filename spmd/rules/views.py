"""Views and joins: where the parts of a dim are after its dims were merged, cut or joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from spmd.layout import Partial, Placement, Shard, chunk_units
from spmd.rules.base import Call, Candidate, DimRule, Rule, aligned, rule

aten = torch.ops.aten
_SELF = (frozenset((0,)),)


def viewed(placement: Shard, shape: Sequence[int], out: Sequence[int]) -> Shard | None:
    """Return the split of a dim of `out` that owns the same elements, or None.

    Args:
        placement: Split of a dim of the viewed tensor.
        shape: Its global shape.
        out: The view's global shape, with as many elements.
    """
    common = math.gcd(*placement.units)
    if common == 0 or math.prod(shape) == 0:
        return None
    before = math.prod(shape[: placement.dim]) * placement.outer
    after = common * math.prod(shape[placement.dim + 1 :])
    units = tuple(n // common for n in placement.units)
    total, left = sum(units), 1
    for dim, size in enumerate(out):
        if before % left == 0 and before // left <= size:
            outer = before // left
            right = math.prod(out[dim + 1 :])
            if size % (outer * total) == 0:
                inner = size // (outer * total)
                if inner * right == after:
                    return Shard(dim, units, outer, inner)
        left *= size
    return None


class View(Rule):
    """Reshape: the split factor is found again among the output's dims."""

    def candidates(
        self, call: Call, placements: Sequence[Sequence[Placement]], num_ranks: int
    ) -> Iterable[Candidate]:
        """Yield the splits that survive the reshape, and partial sums."""
        shape, out = call.operands[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
        for placement in placements[0]:
            if isinstance(placement, Shard):
                moved = viewed(placement, tuple(shape), tuple(out))
                if moved is not None:
                    yield Candidate((placement,), (moved,))
            elif isinstance(placement, Partial):
                yield Candidate((placement,), (placement,))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit a reshape: local strides may differ from the global ones."""
        sizes = emitter.sizes(tuple(call.outputs[0].shape), layouts[0])  # type: ignore[union-attr]
        return emitter.call(aten.reshape.default, (args[0], sizes), {})


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias)
def _view(call: Call) -> Rule:
    return View()


@rule(aten.view.dtype)
def _view_dtype(call: Call) -> Rule | None:
    x, out = call.operands[0], call.outputs[0]
    return DimRule([[*range(x.dim() - 1), None]], [[*range(x.dim() - 1), None]]) if out is not None and x.dim() else None


def _plain(inputs: list[Any], outputs: list[Any], local: Any = None) -> Rule:
    return _ViewRule(inputs, outputs, linear=_SELF, local_args=local)


class _ViewRule(DimRule):
    """A dim rule that moves a partial of any kind through untouched."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        for candidate in super().candidates(call, placements, num_ranks):
            if not any(isinstance(p, Partial) for p in candidate.inputs):
                yield candidate
        if len(call.operands) == 1:
            for placement in placements[0]:
                if isinstance(placement, Partial):
                    yield Candidate((placement,), (placement,) * len(call.outputs))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the view; views take empty tensors."""
        args, kwargs = list(args), dict(kwargs)
        if self.local_args is not None:
            self.local_args(emitter, call, args, kwargs, layouts)
        return emitter.call(call.target, tuple(args), kwargs)


@rule(aten.t.default, aten.transpose.int, aten.permute.default, aten.movedim)
def _permuted(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    if call.target == aten.t.default:
        order = list(reversed(range(ndim)))
    elif call.target == aten.permute.default:
        order = [d % ndim for d in call.argument("dims")]
    else:
        order = list(range(ndim))
        if ndim:
            a, b = call.argument("dim0") % ndim, call.argument("dim1") % ndim
            order[a], order[b] = order[b], order[a]
    return _plain([list(range(ndim))], [order])


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    labels: list[Any] = list(range(ndim))
    labels.insert(call.argument("dim") % (ndim + 1), None)
    return _plain([list(range(ndim))], [labels])


@rule(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def _squeeze(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim")
    asked = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % max(x.dim(), 1) for d in asked}
    gone = {d for d in gone if x.dim() and x.shape[d] == 1}
    labels = [None if i in gone else i for i in range(x.dim())]
    kept = [i for i in range(x.dim()) if i not in gone]
    return _Squeeze([labels], [kept], linear=_SELF)


class _Squeeze(_ViewRule):
    """A local extent of 1 must not be squeezed where the global dim is larger."""

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        sizes = emitter.sizes(tuple(call.outputs[0].shape), layouts[0])  # type: ignore[union-attr]
        return emitter.call(aten.reshape.default, (args[0], sizes), {})


@rule(aten.expand.default, aten.broadcast_to)
def _expand(call: Call) -> Rule:
    x, out = call.operands[0], call.outputs[0]
    assert out is not None

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(out.shape), layouts[0])

    return _plain([aligned(x.shape, out.dim(), out.shape)], [list(range(out.dim()))], local)


class Repeat(Rule):
    """Tiling a split dim repeats the split: one more outer factor."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the tiled split of each placement."""
        repeats = list(call.argument("repeats"))
        shift = len(repeats) - call.operands[0].dim()
        for placement in placements[0]:
            if isinstance(placement, Shard):
                dim = placement.dim + shift
                moved = Shard(dim, placement.units, placement.outer * repeats[dim])
                yield Candidate((placement,), (moved,))
            elif isinstance(placement, Partial):
                yield Candidate((placement,), (placement,))


@rule(aten.repeat.default)
def _repeat(call: Call) -> Rule:
    return Repeat()


@rule(aten.select.int)
def _select(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    dim = call.argument("dim") % ndim
    labels = [None if i == dim else i for i in range(ndim)]
    return _plain([labels], [[i for i in range(ndim) if i != dim]])


@rule(aten.unbind.int)
def _unbind(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    dim = call.argument("dim") % ndim
    labels = [None if i == dim else i for i in range(ndim)]
    kept = [i for i in range(ndim) if i != dim]
    return _plain([labels], [kept] * len(call.outputs))


@rule(aten.select_backward.default, aten.slice_backward.default)
def _cut_backward(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    dim = call.argument("dim") % out.dim()
    labels = [None if i == dim else i for i in range(out.dim())]
    grads = labels if call.target == aten.slice_backward.default else [i for i in labels if i is not None]

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(out.shape), layouts[0])

    if call.target == aten.slice_backward.default:
        return SliceBackward([grads], [labels], linear=_SELF, local_args=local)
    return _plain([grads], [labels], local)


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
    return _plain([labels], [labels])


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk)
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
        dim, size, start, end = self._bounds(call)
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


@rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> Rule:
    x = call.operands[0]
    pad = list(call.argument("pad"))
    touched = {
        x.dim() - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0
    }
    labels = [None if i in touched else i for i in range(x.dim())]
    linear = _SELF if call.argument("value") in (0, 0.0, None) else ()
    return DimRule([labels], [labels], linear=linear)


@rule(aten.diagonal.default, aten.diagonal_copy, aten.diagonal_backward.default)
def _diagonal(call: Call) -> Rule:
    whole = call.outputs[0] if call.target == aten.diagonal_backward.default else call.operands[0]
    assert whole is not None
    ndim = whole.dim()
    pair = {call.argument("dim1") % ndim, call.argument("dim2") % ndim}
    full = [None if i in pair else i for i in range(ndim)]
    cut_ = [i for i in range(ndim) if i not in pair] + [None]
    if call.target != aten.diagonal_backward.default:
        return _plain([full], [cut_])

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(whole.shape), layouts[0])

    return _plain([cut_], [full], local)


@rule(aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
def _scatter_view(call: Call) -> Rule:
    """The written dim is whole; every other dim is free."""
    x, source = call.operands[0], call.operands[1]
    if call.target == aten.diagonal_scatter.default:
        touched = {call.argument("dim1") % x.dim(), call.argument("dim2") % x.dim()}
    else:
        touched = {call.argument("dim") % x.dim()}
    labels = [None if i in touched else i for i in range(x.dim())]
    kept = labels if source.dim() == x.dim() else [i for i in range(x.dim()) if i not in touched]
    if call.target == aten.diagonal_scatter.default:
        kept = [*kept, None]
    return DimRule([labels, kept], [labels], linear=[frozenset((0, 1))])


@rule(aten.unfold.default, aten.unfold_backward.default)
def _unfold(call: Call) -> Rule:
    backward = call.target == aten.unfold_backward.default
    x = call.outputs[0] if backward else call.operands[0]
    assert x is not None
    name = "dim" if backward else "dimension"
    dim = call.argument(name) % x.dim()
    labels = [None if i == dim else i for i in range(x.dim())]

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(x.shape), layouts[0])

    if backward:
        return _plain([[*labels, None]], [labels], local)
    return _plain([labels], [[*labels, None]])


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def _complex_view(call: Call) -> Rule:
    x, out = call.operands[0], call.outputs[0]
    assert out is not None
    ndim = min(x.dim(), out.dim())
    free = list(range(ndim))
    return _plain([free + [None] * (x.dim() - ndim)], [free + [None] * (out.dim() - ndim)])


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    labels = [*range(ndim - 2), None, None]
    return DimRule([labels], [labels], linear=_SELF)


@rule(aten.sum_to_size, aten.native_channel_shuffle, aten.pixel_shuffle, aten.pixel_unshuffle)
def _leading(call: Call) -> Rule | None:
    x, out = call.operands[0], call.outputs[0]
    if out is None or x.dim() != 4 or x.shape[0] != out.shape[0] or call.target == aten.sum_to_size.default:
        return None
    return DimRule([[0, None, None, None]], [[0, None, None, None]], linear=_SELF)
