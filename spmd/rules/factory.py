"""Operators that make tensors: constants are replicated, random ones drawn globally.

Every rank draws the global tensor from the same generator state and keeps its part, so a
mask is bitwise the one of one device, whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

import spmd.ops
import spmd.random_state
import spmd.substitutes  # noqa: F401
from spmd.rules.base import Call, DimRule, Rule, Whole, general_rule, rule

aten = torch.ops.aten


class GlobalDraw(Rule):
    """Whole operands, and a draw in the memory order of the global tensor."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        """Yield nothing: the draw is replicated, its consumers take their part."""
        return ()


class ShapeOnlyDraw(Rule):
    """A draw that needs only the shape of its operand, never its values.

    The operand keeps the placement it has: it is not read.
    """

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        """Yield the operand as it is."""
        from spmd.layout import REPLICATE
        from spmd.rules.base import Candidate

        for placement in placements[0]:
            yield Candidate((placement,), (REPLICATE,) * len(call.outputs))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Draw into a tensor with the global shape and strides of the traced operand."""
        fake = call.operands[0]
        blank = emitter.call(
            aten.empty_strided.default,
            (list(fake.shape), list(fake.stride())),
            {"dtype": fake.dtype, "device": fake.device},
        )
        return emitter.call(call.target, (blank, *args[1:]), kwargs)


@rule(
    aten.bernoulli.p, aten.rand_like, aten.randn_like, aten.randint_like, aten.uniform,
    aten.normal_functional, aten.exponential, aten.geometric, aten.cauchy, aten.log_normal,
    aten.random, torch.ops.spmd.bernoulli,
)  # fmt: skip
def _shape_only(call: Call) -> Rule | None:
    if len(call.operands) != 1:
        return GlobalDraw()
    if call.local_draws:
        dims = list(range(call.operands[0].dim()))
        return DimRule([dims], [dims] * len(call.outputs))
    return ShapeOnlyDraw()


@general_rule(lambda target: torch.Tag.nondeterministic_seeded in target.tags)
def _random(call: Call) -> Rule:
    return GlobalDraw()


@general_rule(lambda target: not any(_is_tensor(a.type) for a in target._schema.arguments))
def _constant(call: Call) -> Rule:
    return Whole()


def _is_tensor(kind: Any) -> bool:
    return "Tensor" in str(kind)


@rule(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided)
def _new(call: Call) -> Rule:
    """Their operand gives dtype and device only."""
    return _UnreadOperand()


class _UnreadOperand(Rule):
    """The operand's values are not read, so it stays where it is."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        from spmd.layout import REPLICATE
        from spmd.rules.base import Candidate

        for placement in placements[0]:
            yield Candidate((placement,), (REPLICATE,))


@rule(aten._local_scalar_dense)
def _scalar(call: Call) -> Rule:
    return Whole()


@rule(
    torch.ops.spmd.nonzero, torch.ops.spmd.repeat_interleave, torch.ops.spmd.bincount,
    torch.ops.spmd.unique,
)  # fmt: skip
def _sized(call: Call) -> Rule:
    """Data-dependent sizes are decided on the whole tensor, the same on every rank."""
    return Whole()
