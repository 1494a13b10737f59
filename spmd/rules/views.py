"""Views and joins: where the parts of a dim are after its dims were merged, cut or joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from spmd.layout import Partial, Placement, Shard
from spmd.rules.base import Call, Candidate, DimRule, Rule, aligned, rule

aten = torch.ops.aten
SELF = (frozenset((0,)),)


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
    return (
        DimRule([[*range(x.dim() - 1), None]], [[*range(x.dim() - 1), None]])
        if out is not None and x.dim()
        else None
    )


def plain(inputs: list[Any], outputs: list[Any], local: Any = None) -> Rule:
    """Return the rule of a view with labelled dims; partials of any kind pass through."""
    return _ViewRule(inputs, outputs, linear=SELF, local_args=local)


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
    return plain([list(range(ndim))], [order])


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    labels: list[Any] = list(range(ndim))
    labels.insert(call.argument("dim") % (ndim + 1), None)
    return plain([list(range(ndim))], [labels])


@rule(aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims)
def _squeeze(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim")
    asked = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % max(x.dim(), 1) for d in asked}
    gone = {d for d in gone if x.dim() and x.shape[d] == 1}
    labels = [None if i in gone else i for i in range(x.dim())]
    kept = [i for i in range(x.dim()) if i not in gone]
    return _Squeeze([labels], [kept], linear=SELF)


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

    return plain([aligned(x.shape, out.dim(), out.shape)], [list(range(out.dim()))], local)


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
    return plain([labels], [[i for i in range(ndim) if i != dim]])


@rule(aten.unbind.int)
def _unbind(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    dim = call.argument("dim") % ndim
    labels = [None if i == dim else i for i in range(ndim)]
    kept = [i for i in range(ndim) if i != dim]
    return plain([labels], [kept] * len(call.outputs))


@rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> Rule:
    x = call.operands[0]
    pad = list(call.argument("pad"))
    touched = {x.dim() - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0}
    labels = [None if i in touched else i for i in range(x.dim())]
    linear = SELF if call.argument("value") in (0, 0.0, None) else ()
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
        return plain([full], [cut_])

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        args[1] = emitter.sizes(tuple(whole.shape), layouts[0])

    return plain([cut_], [full], local)


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
        return plain([[*labels, None]], [labels], local)
    return plain([labels], [[*labels, None]])


@rule(aten.view_as_real.default, aten.view_as_complex.default)
def _complex_view(call: Call) -> Rule:
    x, out = call.operands[0], call.outputs[0]
    assert out is not None
    ndim = min(x.dim(), out.dim())
    free = list(range(ndim))
    return plain([free + [None] * (x.dim() - ndim)], [free + [None] * (out.dim() - ndim)])


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    labels = [*range(ndim - 2), None, None]
    return DimRule([labels], [labels], linear=SELF)


@rule(aten.sum_to_size, aten.native_channel_shuffle, aten.pixel_shuffle, aten.pixel_unshuffle)
def _leading(call: Call) -> Rule | None:
    x, out = call.operands[0], call.outputs[0]
    if (
        out is None
        or x.dim() != 4
        or x.shape[0] != out.shape[0]
        or call.target == aten.sum_to_size.default
    ):
        return None
    return DimRule([[0, None, None, None]], [[0, None, None, None]], linear=SELF)
