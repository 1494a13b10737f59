"""Element-wise operators: every dim is free, sizes of 1 broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.layout import Partial, Replicate
from spmd.rules.base import Call, Candidate, DimRule, Rule, Whole, aligned, general_rule, rule

aten = torch.ops.aten

# Linear in all tensor operands together: partial sums in, partial sum out.
_JOINTLY_LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}
# Linear in each operand while the others are whole.
_LINEAR_EACH = {aten.mul.Tensor}
# Linear in the first operand only.
_LINEAR_FIRST = {
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.clone.default,
    aten.real.default, aten.imag.default, aten.conj.default, aten._conj.default,
    aten._neg_view.default,
    aten.masked_fill.Scalar,
}  # fmt: skip


class Pointwise(DimRule):
    """Broadcast dims are labelled by the output dim they line up with."""

    def __init__(self, call: Call, linear: Sequence[frozenset[int]] = ()) -> None:
        out = next(o for o in call.outputs if o is not None)
        labels = [aligned(x.shape, out.dim(), out.shape) for x in call.operands]
        outputs = [list(range(out.dim())) for _ in call.outputs]
        super().__init__(labels, outputs, linear=linear)

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Run the operator; element-wise kernels take empty tensors."""
        return emitter.call(call.target, args, kwargs)


def _linear(call: Call) -> tuple[frozenset[int], ...]:
    target, count = call.target, len(call.operands)
    out = next((o for o in call.outputs if o is not None), None)
    is_rounding = out is not None and (out.dtype.is_floating_point or out.dtype.is_complex)
    if not is_rounding and target not in _JOINTLY_LINEAR:
        return ()
    if target in _JOINTLY_LINEAR:
        # A Python number beside one tensor would be added once per rank.
        return (frozenset(range(count)),) if count == 2 else ()
    if target in _LINEAR_EACH:
        return tuple(frozenset((i,)) for i in range(count))
    if target in _LINEAR_FIRST:
        if target == aten.masked_fill.Scalar and call.argument("value") != 0:
            return ()
        return (frozenset((0,)),)
    if target == aten.where.self and count == 3:
        return (frozenset((1, 2)),)
    if target == aten._to_copy.default:
        widens = out.dtype.itemsize >= call.operands[0].dtype.itemsize  # type: ignore[union-attr]
        same_kind = call.operands[0].dtype.is_floating_point
        return (frozenset((0,)),) if widens and same_kind else ()
    return ()


@general_rule(lambda target: torch.Tag.pointwise in target.tags)
def _pointwise(call: Call) -> Rule | None:
    if not call.operands:
        return Whole()  # Python numbers, the same on every rank
    if not any(o is not None for o in call.outputs):
        return None
    return Pointwise(call, _linear(call))


@rule(
    aten.clone, aten._to_copy, aten.lift_fresh_copy, aten.copy.default, aten.fill.Scalar,
    aten.fill.Tensor,
    aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.hardtanh_backward,
    aten.leaky_relu_backward, aten.elu_backward, aten.gelu_backward, aten.threshold_backward,
    aten.softplus_backward, aten.softplus, aten.hardswish_backward, aten.hardsigmoid_backward,
    aten.sigmoid_backward, aten.tanh_backward, aten.silu_backward, aten.mish_backward,
    aten.logit_backward, aten.log_sigmoid_backward, aten.softshrink_backward,
    aten.hardshrink_backward, aten.rsub, aten.polar, aten.complex, aten.view_as,
    aten.isclose, aten._conj, aten._neg_view, aten.real, aten.imag, aten.resolve_conj,
    aten.resolve_neg,
    aten.floor_divide, aten.clamp, aten.prelu, aten._prelu_kernel, aten._prelu_kernel_backward,
    aten.nan_to_num, aten.heaviside, aten.log_sigmoid_forward, aten.bitwise_not,
    aten.glu_jvp, aten.igamma, aten.igammac, aten.lerp, aten.isin.Tensor_Scalar,
    aten.hardswish, aten.rrelu_with_noise_backward,
    aten.fmod, aten.remainder, aten.copysign, aten.special_xlog1py, aten.xlogy,
    aten.kl_div, aten._conj_physical, aten.conj_physical, aten.addcmul, aten.addcdiv,
)  # fmt: skip
def _listed_pointwise(call: Call) -> Rule | None:
    if call.target in (aten.log_sigmoid_forward.default,):
        # The second output is a buffer that is empty on CPU; never sharded.
        x = list(range(call.operands[0].dim()))
        out = [
            x if o is not None and o.shape == call.operands[0].shape else [] for o in call.outputs
        ]
        return DimRule([x], out) if all(out) else None
    return _pointwise(call)


@rule(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.zero.default)
def _like(call: Call) -> Rule:
    return _Like(call, _linear(call))


class _Like(Pointwise):
    """Only the operand's shape is read, so a partial one is not reduced for it."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        """Yield what an element-wise operator may do, and a partial operand left as it is."""
        yield from super().candidates(call, placements, num_ranks)
        for placement in placements[0]:
            if isinstance(placement, Partial):
                yield Candidate((placement,), (Replicate(),))


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.isin.Tensor_Tensor)
def _lookup(call: Call) -> Rule | None:
    """One operand is a table every rank needs whole, the other is free."""
    free = 1 if call.target == aten.searchsorted.Tensor else 0
    if call.target == aten.searchsorted.Tensor and call.operands[0].dim() != 1:
        return None
    labels: list[Any] = [[None] * x.dim() for x in call.operands]
    labels[free] = list(range(call.operands[free].dim()))
    return DimRule(labels, [labels[free]])
