"""Layer normalisation as its parts, each with random rounding: what `rounding` runs for it.

The same operators in the same order as torch's decomposition, called directly: through a
dispatch mode each of some 30 operators per layer takes several times as long as it does here.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor


class Rounding(Protocol):
    """Perturbs results in place; see `rounding.RandomRounding`."""

    def rounded(self, value: Tensor) -> Tensor:
        """Return the result of an operator that rounds, perturbed."""
        ...

    def moved(self, value: Tensor) -> Tensor:
        """Return a copy of an operand of a kernel that sums and subtracts inside, perturbed."""
        ...

    def total(self, value: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Return a sum, perturbed by what rounding its terms does."""
        ...


def forward(rounding: Rounding, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of `native_layer_norm`: the result, [..., *shape], mean and 1 / deviation.

    Args:
        rounding: Perturbs results.
        arguments: Of the operator: source, normalised shape, weight, bias, epsilon.

    Source: torch 2.13, `_refs.native_layer_norm`.
    """
    source, shape, weight, bias, eps = arguments
    dims = list(range(source.ndim - len(shape), source.ndim))
    variance, mean = torch.var_mean(rounding.moved(source), dims, correction=0, keepdim=True)
    variance, mean = rounding.rounded(variance), rounding.rounded(mean)
    inverse = rounding.rounded(rounding.rounded(variance + eps).rsqrt())
    result = rounding.rounded(rounding.rounded(source - mean) * inverse)
    if weight is not None:
        result = rounding.rounded(result * weight)
    if bias is not None:
        result = rounding.rounded(result + bias)
    return result, mean, inverse


def backward(
    rounding: Rounding, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the outputs of `native_layer_norm_backward`: gradients of source, weight, bias.

    Args:
        rounding: Perturbs results.
        arguments: Of the operator: gradient, source, normalised shape, mean, 1 / deviation,
            weight, bias, and which of the outputs are wanted.

    Source: torch 2.13, `_decomp.decompositions.native_layer_norm_backward`.
    """
    gradient, source, shape, mean, inverse, weight, bias, wanted = arguments
    outer = list(range(source.ndim - len(shape)))
    inner = list(range(len(outer), source.ndim))
    gradient, count = gradient.contiguous(), math.prod(shape)
    normal = rounding.rounded(rounding.rounded(source - mean) * inverse)
    scaled = gradient if weight is None else rounding.rounded(gradient * weight)
    to_source = to_weight = to_bias = None
    if wanted[0]:
        sums = rounding.total(scaled, inner, keepdim=True)
        products = rounding.total(rounding.rounded(scaled * normal), inner, keepdim=True)
        part = rounding.rounded(rounding.rounded(scaled * count) - sums)
        part = rounding.rounded(part - rounding.rounded(normal * products))
        to_source = rounding.rounded(rounding.rounded(inverse / count) * part)
    if wanted[1] and weight is not None:
        to_weight = rounding.rounded(gradient * normal)
        to_weight = rounding.total(to_weight, outer, keepdim=False) if outer else to_weight
    if wanted[2] and bias is not None:
        to_bias = rounding.total(gradient, outer, keepdim=False) if outer else gradient.clone()
    return to_source, to_weight, to_bias
