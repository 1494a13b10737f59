"""Distance between floating values, counted in representable values."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_INTEGER: Final = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Count the representable values between two float tensors, elementwise.

    Args:
        actual: [...], float16, bfloat16, float32 or float64.
        expected: Same shape and dtype as `actual`.

    Returns:
        int64 [...], in ulp of that dtype. Equal values give 0, and so do +0.0 and -0.0. If
        either side is NaN, or float64 values are further apart than int64 can hold, the
        distance is the largest int64.

    Source: IEEE 754 ordering property - for one sign, bit patterns order like the values;
    negative patterns are mirrored to make the order total.
    """
    largest = torch.iinfo(torch.int64).max
    left, right = _ordered(actual), _ordered(expected)
    distance = left - right
    # Values of opposite sign: the difference of two int64 can wrap around.
    wrapped = ((left ^ right) < 0) & ((distance ^ left) < 0)
    distance = torch.where(wrapped, largest, distance.abs())
    return torch.where(actual.isnan() | expected.isnan(), largest, distance)


def finite_ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return `ulp_distance` of values none of which is NaN, with fewer calls."""
    if actual.dtype == torch.float64:
        return ulp_distance(actual, expected)
    return (_ordered(actual) - _ordered(expected)).abs()  # 32 bits: nothing wraps around


def _ordered(value: Tensor) -> Tensor:
    """Return integers that order like the values, int64 [...]."""
    kind = _INTEGER[value.dtype]
    bits = value.contiguous().view(kind).to(torch.int64)
    lowest = torch.iinfo(kind).min
    return torch.where(bits < 0, lowest - bits, bits)
