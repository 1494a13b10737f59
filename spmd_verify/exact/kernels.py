"""How far a kernel that rounds may be off, in any layout: bounds for the exactness proof.

Given exact operands. All tensors are global.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Functions of torch's vector library promise 1 ulp, and kernels chain two or three; twice that.
FUNCTION_ULP: Final = 6.0
# Sums of n terms are off by log2(n) ulp where they go by halves, as torch's do; twice that,
# because ranks add up parts of them.
SUM_ULP: Final = 2.0
_OVER_DIMS: Final = frozenset(("_softmax", "_log_softmax", "logsumexp"))
_NORMS: Final = frozenset(("native_layer_norm", "_fused_rms_norm", "native_batch_norm"))


def kernel_errors(name: str, args: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor]:
    """Return how far each element of each result may be off, in the results' shapes."""
    operand = next(x for x in args if isinstance(x, Tensor))
    if name in _NORMS:
        return _of_norm(name, operand, results)
    errors = []
    for value in results:
        size = value.abs() + 1.0
        if value.shape == operand.shape and name not in _OVER_DIMS:
            size = size + operand.abs()  # where factors cancel, as in gelu
        terms = operand.numel() // max(value.numel(), 1)
        if name in _OVER_DIMS and operand.dim():
            terms = math.prod(operand.shape[dim] for dim in pytree.tree_leaves(args[1]))
        errors.append(_ulp(terms) * torch.finfo(value.dtype).eps * _finite(size))
    return errors


def _of_norm(name: str, operand: Tensor, results: Sequence[Tensor]) -> list[Tensor]:
    """Return the bounds of `(normalised, mean, inverse deviation)`, or without the mean.

    Kernels compute `x * r - mean * r`, so both products count, not what they leave.
    """
    value, deviation = results[0], results[-1]
    mean = results[1] if len(results) > 2 else torch.zeros_like(deviation)
    if name == "native_batch_norm":
        channels = [1, -1, *[1] * (operand.dim() - 2)]
        mean, deviation = mean.reshape(channels), deviation.reshape(channels)
    unit = _ulp(operand.numel() // max(deviation.numel(), 1)) * torch.finfo(value.dtype).eps
    parts = (operand.abs() + mean.abs()) * deviation
    # The deviation is as far off as the normalised value, of which it is a factor.
    errors = [unit * (parts + value.abs())]
    if len(results) > 2:
        errors.append(unit * (results[1].abs() + operand.abs().max()))
    worst = (parts.max() if parts.numel() else parts.sum()) + 1.0
    return [*errors, unit * results[-1].abs() * worst]


def _ulp(terms: int) -> float:
    return FUNCTION_ULP + SUM_ULP * math.log2(max(terms, 1))


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
