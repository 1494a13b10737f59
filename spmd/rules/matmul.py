"""Matrix products: batch, row and column dims are free, the contracted dim gives a partial sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from spmd.layout import Partial, Shard
from spmd.rules.base import Call, Candidate, DimRule, Rule, aligned, rule

aten = torch.ops.aten
_EITHER = (frozenset((0,)), frozenset((1,)))


@rule(aten.mm.default)
def _mm(call: Call) -> Rule:
    return DimRule([["m", "k"], ["k", "n"]], [["m", "n"]], {"k": "sum"}, _EITHER)


@rule(aten.bmm.default)
def _bmm(call: Call) -> Rule:
    return DimRule([["b", "m", "k"], ["b", "k", "n"]], [["b", "m", "n"]], {"k": "sum"}, _EITHER)


@rule(aten.mv.default)
def _mv(call: Call) -> Rule:
    return DimRule([["m", "k"], ["k"]], [["m"]], {"k": "sum"}, _EITHER)


@rule(aten.dot.default, aten.vdot.default)
def _dot(call: Call) -> Rule:
    return DimRule([["k"], ["k"]], [[]], {"k": "sum"}, _EITHER)


@rule(aten.ger.default, aten.outer.default)
def _outer(call: Call) -> Rule:
    return DimRule([["m"], ["n"]], [["m", "n"]], linear=_EITHER)


class _Added(DimRule):
    """beta * input + alpha * (left @ right).

    The contracted dim gives a partial sum, to which each rank would add the input: that has
    to be a partial sum too, of which a replicated one counts on the first rank only.
    """

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the free dims, and the contracted dim beside an input that is a partial sum."""
        yield from super().candidates(call, placements, num_ranks)
        for placement in _contracted(self.inputs, placements):
            product = tuple(placement.moved(labels.index("k")) for labels in self.inputs[1:])
            yield Candidate((Partial("sum"), *product), (Partial("sum"),))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the product; a rank with nothing to contract still adds its share of the input."""
        if any(isinstance(placement, Partial) for placement in layouts[0].placements):
            return emitter.call(call.target, args, kwargs)
        return super().emit(emitter, call, args, kwargs, layouts)


def _contracted(labels: Any, placements: Any) -> dict[Shard, None]:
    """Return the splits of the contracted dim that a factor of the product has, as of dim 0."""
    return {
        placement.moved(0): None
        for own, forms in zip(labels[1:], placements[1:], strict=True)
        for placement in forms
        if isinstance(placement, Shard) and own[placement.dim] == "k"
    }


def _added(call: Call, left: list[str], right: list[str], out: list[str]) -> Rule:
    bias = aligned(call.operands[0].shape, len(out), call.outputs[0].shape)  # type: ignore[union-attr]
    labels = [None if i is None else out[i] for i in bias]
    return _Added([labels, left, right], [out])


@rule(aten.addmm.default)
def _addmm(call: Call) -> Rule:
    return _added(call, ["m", "k"], ["k", "n"], ["m", "n"])


@rule(aten.baddbmm.default)
def _baddbmm(call: Call) -> Rule:
    return _added(call, ["b", "m", "k"], ["b", "k", "n"], ["b", "m", "n"])


@rule(aten.addmv.default)
def _addmv(call: Call) -> Rule:
    return _added(call, ["m", "k"], ["k"], ["m"])


@rule(aten.addr.default)
def _addr(call: Call) -> Rule:
    return _added(call, ["m"], ["n"], ["m", "n"])


@rule(aten._trilinear.default)
def _trilinear(call: Call) -> Rule | None:
    """Sum over dims of a product of three broadcast operands (nn.Bilinear)."""
    ndim = call.operands[0].dim() + len(call.argument("expand1"))
    inputs = []
    for _, name in zip(call.operands, ("expand1", "expand2", "expand3"), strict=True):
        expanded = set(call.argument(name))
        inputs.append([i for i in range(ndim) if i not in expanded])
    summed = set(call.argument("sumdim"))
    output = [i for i in range(ndim) if i not in summed]
    linear = tuple(frozenset((i,)) for i in range(3))
    return DimRule(inputs, [output], dict.fromkeys(summed, "sum"), linear)
