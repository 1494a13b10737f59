"""Operators that reduce or scan dims: reduced dims become partial, scanned ones are whole."""

from __future__ import annotations

from typing import Any

import torch

from spmd.layout import Partial
from spmd.rules.base import Call, DimRule, Label, Rule, rule

aten = torch.ops.aten

_REDUCE_OP = {"sum": "sum", "nansum": "sum", "count_nonzero": "sum", "amax": "max", "amin": "min",
              "max": "max", "min": "min", "any": "max", "all": "min",
              "_is_any_true": "max", "_is_all_true": "min"}  # fmt: skip


def reduced_dims(call: Call, ndim: int) -> list[int]:
    """Return the dims a reduction call takes away, all of them if it names none."""
    dim = call.argument("dim")
    if dim is None or dim == []:
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % max(ndim, 1) for d in dims]


def _kept(labels: list[Label], dims: list[int], keepdim: bool) -> list[Label | None]:
    if keepdim:
        return [None if i in dims else label for i, label in enumerate(labels)]
    return [label for i, label in enumerate(labels) if i not in dims]


@rule(
    aten.sum, aten.nansum, aten.count_nonzero, aten.amax, aten.amin, aten.max.default,
    aten.min.default, aten.any, aten.all, aten._is_any_true, aten._is_all_true,
)  # fmt: skip
def _reduction(call: Call) -> Rule:
    x = call.operands[0]
    dims = reduced_dims(call, x.dim())
    labels = list(range(x.dim()))
    name = call.target._schema.name.split("::")[1]
    op: Any = _REDUCE_OP[name]
    output = _kept(labels, dims, bool(call.argument("keepdim", False)))
    linear = (frozenset((0,)),) if name == "sum" else ()
    return DimRule([labels], [output], dict.fromkeys(dims, op), linear)


def _scanned(
    call: Call, dims: list[int], keepdim: bool | None = None, linear: bool = False
) -> Rule:
    """Dims of `dims` whole; outputs drop them if `keepdim` is False, keep them otherwise."""
    x = call.operands[0]
    whole = {d % max(x.dim(), 1) for d in dims}
    labels = [None if i in whole else i for i in range(x.dim())]
    kept = _kept(labels, sorted(whole), keepdim) if keepdim is not None else labels
    outputs = [kept if o is not None else [] for o in call.outputs]
    inputs = [labels if y.dim() == x.dim() else [None] * y.dim() for y in call.operands]
    return DimRule(inputs, outputs, linear=(frozenset((0,)),) if linear else ())


@rule(aten.max.dim, aten.min.dim, aten.argmax, aten.argmin, aten.prod.dim_int, aten.median.dim,
      aten.nanmedian.dim, aten.kthvalue, aten.mode)  # fmt: skip
def _selected(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim")
    if dim is None:
        return _scanned(call, list(range(x.dim())), keepdim=False)
    return _scanned(call, [dim], keepdim=bool(call.argument("keepdim", False)))


@rule(aten.prod.default, aten.median.default, aten.nanmedian.default)
def _whole_reduction(call: Call) -> Rule:
    return _scanned(call, list(range(call.operands[0].dim())), keepdim=False)


@rule(aten._softmax, aten._log_softmax, aten.cumprod, aten.logcumsumexp,
      aten.cummax, aten.cummin, aten.sort, aten.topk, aten.argsort, aten._safe_softmax,
      aten.renorm)  # fmt: skip
def _scan(call: Call) -> Rule:
    dim = call.argument("dim", -1)
    if call.target == aten.renorm.default:
        x = call.operands[0]
        return _scanned(call, [i for i in range(x.dim()) if i != dim % x.dim()])
    return _scanned(call, [-1 if dim is None else dim])


@rule(aten.cumsum, aten.flip, aten.roll)
def _linear_scan(call: Call) -> Rule:
    x = call.operands[0]
    dims = call.argument("dim") if call.target == aten.cumsum.default else call.argument("dims")
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        dims = list(range(x.dim()))
    return _scanned(call, dims, linear=True)


@rule(aten._softmax_backward_data, aten._log_softmax_backward_data)
def _softmax_backward(call: Call) -> Rule:
    return _scanned(call, [call.argument("dim")])


class VectorNorm(Rule):
    """A p-norm over sharded dims: local norm to the p, summed, to the 1/p; inf by max."""

    def __init__(self, call: Call) -> None:
        x = call.operands[0]
        self.order = float(call.argument("ord", 2))
        self.dims = reduced_dims(call, x.dim())
        labels = list(range(x.dim()))
        self.output = _kept(labels, self.dims, bool(call.argument("keepdim", False)))

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        """Yield the dims that stay, and the reduced ones as a partial result."""
        free = DimRule([list(range(call.operands[0].dim()))], [self.output])
        yield from free.candidates(call, placements, num_ranks)
        if self.order > 0:
            op: Any = "max" if self.order == float("inf") else "sum"
            labels = list(range(call.operands[0].dim()))
            reduce = DimRule([labels], [self.output], dict.fromkeys(self.dims, op))
            for candidate in reduce.candidates(call, placements, num_ranks):
                if isinstance(candidate.outputs[0], Partial):
                    yield candidate

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the norm; where it is partial, its p-th power, reduced and rooted at once."""
        node = emitter.operator(call.target, args, kwargs)
        partial = [a for a, p in enumerate(layouts[0].placements) if isinstance(p, Partial)]
        if not partial:
            return node
        return emitter.root_of_sum(node, self.order, layouts, call.outputs[0])


@rule(aten.linalg_vector_norm, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _vector_norm(call: Call) -> Rule | None:
    if call.target != aten.linalg_vector_norm.default:
        return None
    if any(isinstance(a, torch.fx.Node) for a in call.node.args[1:]):
        return None
    return VectorNorm(call)


@rule(aten._cdist_forward, aten._euclidean_dist)
def _distances(call: Call) -> Rule | None:
    x, y = call.operands
    if x.shape[:-2] != y.shape[:-2]:
        return None
    batch = [f"b{i}" for i in range(x.dim() - 2)]
    return DimRule([[*batch, "p", None], [*batch, "r", None]], [[*batch, "p", "r"]])


@rule(aten._cdist_backward)
def _distances_backward(call: Call) -> Rule | None:
    _, x, y, _ = call.operands
    if x.shape[:-2] != y.shape[:-2]:
        return None
    batch = [f"b{i}" for i in range(x.dim() - 2)]
    pair = [*batch, "p", "r"]
    return DimRule(
        [pair, [*batch, "p", None], [*batch, "r", None], pair], [[*batch, "p", None]], {"r": "sum"}
    )
