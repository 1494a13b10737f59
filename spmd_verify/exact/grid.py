"""Bring values that round to a coarse grid, or to a power of two, by traceable operators.

Called below autograd, on real and on fake tensors; reads no value. The grids are far above any
kernel's rounding error, which `exact.proof` checks on the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten

# Steps of the grid per unit, and where it ends: few bits, so that several layers fit into 24.
GRID: Final = 4.0
LIMIT: Final = 4.0
PROBABILITY_GRID: Final = 8.0
NORMAL_GRID: Final = 1.0
NORMAL_LIMIT: Final = 2.0
# What attention multiplies: whole numbers of four bits.
FACTOR_GRID: Final = 1.0
FACTOR_LIMIT: Final = 8.0
# Bits of a gradient at the backward of a surrogate, and how many of them are above
# 1 / N, N the elements that the loss is a mean of. Chosen: 11 bits leave 13 of float32 for the
# products and sums until the next surrogate.
GRADIENT_BITS: Final = {torch.float64: 28, torch.float32: 11}
FEWEST_GRADIENT_BITS: Final = 4
LARGE_GRADIENT: Final = 5
# Where values are cut: no dyadic number of few bits lies near a boundary.
OFFSET: Final = 0.41421356
# Powers of two that a divisor, a root or a norm may become.
POWERS: Final = tuple(2.0**k for k in range(-12, 13))
# Above this share of a power, a value becomes it. Not 1 / sqrt(2): roots of sums of powers of
# two, such as a norm of norms, would lie there.
EDGE: Final = 0.6545
# A constant keeps this many significant bits in a product, and this grid in a sum.
CONSTANT_BITS: Final = 5
SUM_GRID: Final = 16.0
# Larger constants stand for infinity in masks; a softmax makes as little of the second.
SENTINEL: Final = 2.0**20
STAND_IN: Final = 2.0**10


@dataclass
class Gradients:
    """The grid of gradients where they enter and where they leave the backward of a surrogate.

    Without it every layer would add its bits. It follows the loss, so that the parts of a
    batch, whose mean is over fewer elements, are rounded alike.

    Attributes:
        bits: How many bits they have.
        count: N, as far as the step has told: the most elements that one mean was over.
    """

    bits: int
    count: float = field(default=1.0, init=False)

    def take_mean(self, count: float) -> None:
        """Take note of a mean over `count` elements whose result is one number."""
        self.count = max(self.count, nearest_power(count))

    def coarse(self, gradient: Tensor) -> Tensor:
        """Return a gradient on the grid; any shape."""
        limit = 2.0**LARGE_GRADIENT / self.count
        return rounded(gradient, 2.0**self.bits / limit, limit)


@dataclass(frozen=True)
class Replaced:
    """A call that something stands in for: an operator, its arguments, and the gradients' grid."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    gradients: Gradients

    def run(self) -> Any:
        """Run the operator itself."""
        return self.func(*self.args, **self.kwargs)

    @property
    def gradient(self) -> Tensor:
        """Return the first argument, a gradient, on its grid."""
        return self.gradients.coarse(self.args[0])


def quantised(value: Tensor, grid: float = GRID, limit: float = LIMIT) -> Tensor:
    """Return a value that rounds on a grid of `1 / grid`, within a limit; any shape."""
    steps = aten.floor.default(aten.add.Tensor(aten.mul.Tensor(value, grid), OFFSET))
    return aten.clamp.default(aten.mul.Tensor(steps, 1.0 / grid), -limit, limit)


def rounded(value: Tensor, grid: float, limit: float) -> Tensor:
    """Return an exact value on a grid of `1 / grid`, a power of two, within a limit; any shape."""
    steps = aten.round.default(aten.mul.Tensor(value, grid))
    return aten.clamp.default(aten.mul.Tensor(steps, 1.0 / grid), -limit, limit)


def probability(value: Tensor) -> Tensor:
    """Return a value between 0 and 1 on a grid of its own."""
    return quantised(value, PROBABILITY_GRID, 1.0)


def normal(value: Tensor) -> Tensor:
    """Return a normalised value on a grid of its own."""
    return quantised(value, NORMAL_GRID, NORMAL_LIMIT)


def power_of_two(value: Tensor, *, is_signed: bool = False) -> Tensor:
    """Return the power of two near each value; any shape.

    Chosen by comparing, because no kernel promises an exact logarithm. Zero becomes the
    smallest power.

    Args:
        value: Not negative, unless `is_signed`.
        is_signed: Whether values may be negative; their sign is kept.
    """

    def table(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=value.dtype, device=value.device)

    edges = table([power * EDGE for power in POWERS])
    size = aten.unsqueeze.default(aten.abs.default(value), -1)
    chosen = aten.where.self(aten.gt.Tensor(size, edges), table(POWERS), table(POWERS[:1]))
    found = aten.amax.default(chosen, [-1])
    if not is_signed:
        return found
    return aten.where.self(aten.lt.Scalar(value, 0), aten.neg.default(found), found)


def scaled_sum(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over dims, kept as 1, times the power of two nearest to 1 / their count."""
    count = math.prod(value.shape[dim] for dim in dims)
    total = aten.sum.dim_IntList(value, list(dims), True)
    return total if count < 2 else aten.mul.Tensor(total, 1.0 / nearest_power(count))


def nearest_power(number: float) -> float:
    """Return the power of two nearest to a number that is not zero, its sign kept."""
    return math.copysign(2.0 ** round(math.log2(abs(number))), number)


def is_power(number: float) -> bool:
    """Say whether a number is a power of two, either sign."""
    return math.frexp(abs(number))[0] == 0.5


def few_bits(number: float) -> float:
    """Return a constant of a product if it has few bits, else the nearest power of two."""
    if not math.isfinite(number) or (math.frexp(number)[0] * 2**CONSTANT_BITS).is_integer():
        return number
    return math.copysign(STAND_IN, number) if abs(number) >= SENTINEL else nearest_power(number)


def near_sum(number: float) -> float:
    """Return a constant as a sum may add it: on a grid of 1 / `SUM_GRID`, sentinels as is."""
    if not math.isfinite(number):
        return number
    if abs(number) >= SENTINEL:
        return math.copysign(STAND_IN, number)
    return round(number * SUM_GRID) / SUM_GRID
