"""Deviations from the float64 reference and their sums per dim-0 row.

The noise floors and the comparison of candidates use these same functions, so that both
sides of every ratio are the same norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

# Larger tensors are not copied to be stacked: for them the calls cost nothing beside the work.
# Below torch's grain for threads (32768), so that sums have one order however many are stacked.
LARGEST_STACKED: Final = 1 << 14


def as_real(value: Tensor) -> Tensor:
    """Return a complex tensor as [..., 2] real; others unchanged."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def is_rounding(value: Tensor) -> bool:
    """Say whether a tensor's dtype rounds; integers and booleans are compared exactly."""
    return value.is_floating_point() or value.is_complex()


def rows_of(value: Tensor) -> Tensor:
    """Return a tensor as [rows, elements per row]; a 0-dim tensor has one row."""
    if value.ndim == 0:
        return value.reshape(1, 1)
    # reshape(n, -1) refuses a part without rows, which small parameters have.
    return value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)


def row_sums(value: Tensor) -> Tensor:
    """Return the sum of each dim-0 row, float64 [rows]."""
    return rows_of(value).sum(dim=1, dtype=torch.float64)


def num_rows(shape: tuple[int, ...] | list[int]) -> int:
    """Return how many dim-0 rows a tensor of `shape` has."""
    return int(shape[0]) if shape else 1


def can_be_stacked(*values: Tensor) -> bool:
    """Say whether sums over tensors of one shape have the same order in a stack of such."""
    return values[0].numel() > 0 and all(
        value.is_floating_point() and value.is_contiguous() for value in values
    )


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Return equal-shaped contiguous tensors as [count, elements]; one is not copied."""
    whole = values[0].unsqueeze(0) if len(values) == 1 else torch.stack(list(values))
    return whole.reshape(len(values), -1)


def finite_deviation(value: Tensor, exact: Tensor, expected: Tensor | None = None) -> Tensor:
    """Return `deviation` with every element that is still not finite set to 0."""
    difference = as_real(value).to(torch.float64) - as_real(exact).to(torch.float64)
    if bool(difference.isfinite().all()):
        return difference
    return deviation(value, exact, expected).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def deviation(value: Tensor, exact: Tensor, expected: Tensor | None = None) -> Tensor:
    """Return `value - exact` in float64, same shape ([..., 2] for complex).

    Where both are the same infinity or both NaN, and where `value` has the very bits of
    `expected`, the deviation of a non-finite result is 0; any other non-finite result stays
    as it is.

    Args:
        value: Candidate or noise run.
        exact: Float64 reference of the same shape.
        expected: The reference in the case's dtype, for overflow that both share.
    """
    left, right = as_real(value).to(torch.float64), as_real(exact).to(torch.float64)
    difference = left - right
    if bool(difference.isfinite().all()):
        return difference
    alike = (left == right) | (left.isnan() & right.isnan())
    if expected is not None:
        twin = as_real(expected).to(torch.float64)
        alike |= (left == twin) | (left.isnan() & twin.isnan())
    return difference.masked_fill(alike & ~difference.isfinite(), 0.0)
