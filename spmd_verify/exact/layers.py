"""Exact stand-ins for operators with several results: normalisations and attention.

A normalisation keeps its own kernel in forward, without weight and bias, and its result goes
to the grid. Its backward is that of the gridded value: gradient minus its projections, means
as sums times powers of two, the inverse deviation as a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.exact.grid import (
    FACTOR_GRID,
    FACTOR_LIMIT,
    Replaced,
    nearest_power,
    normal,
    power_of_two,
    probability,
    rounded,
    scaled_sum,
)

aten = torch.ops.aten
# Backward kernels are not told the model's eps, so both directions use this one.
EPSILON: Final = 1e-5


def layer_norm(call: Replaced) -> Any:
    """Stand for `native_layer_norm(x, shape, weight, bias, eps)`."""
    value, shape, weight, bias = call.args[:4]
    plain, mean, rstd = call.func(value, shape, None, None, EPSILON)
    return _scaled(normal(plain), weight, bias), mean, _deviation(rstd)


def layer_norm_backward(call: Replaced) -> Any:
    """Stand for its backward; the results that `mask` leaves out are None."""
    value, shape, _mean, rstd, weight, _bias, mask = call.args[1:]
    gradient = call.gradient
    plain = normal(aten.native_layer_norm.default(value, shape, None, None, EPSILON)[0])
    dims = list(range(value.dim() - len(shape), value.dim()))
    rest = list(range(value.dim() - len(shape)))
    inner = _scaled(gradient, weight, None)
    return (
        _projected(call, inner, plain, rstd, dims, is_centred=True) if mask[0] else None,
        _summed(aten.mul.Tensor(gradient, plain), rest) if mask[1] else None,
        _summed(gradient, rest) if mask[2] else None,
    )


def rms_norm(call: Replaced) -> Any:
    """Stand for `_fused_rms_norm(x, shape, weight, eps)`."""
    value, shape, weight = call.args[:3]
    plain, rstd = call.func(value, shape, None, EPSILON)
    return _scaled(normal(plain), weight, None), _deviation(rstd)


def rms_norm_backward(call: Replaced) -> Any:
    """Stand for its backward."""
    value, shape, rstd, weight, mask = call.args[1:]
    gradient = call.gradient
    plain = normal(aten._fused_rms_norm.default(value, shape, None, EPSILON)[0])
    dims = list(range(value.dim() - len(shape), value.dim()))
    rest = list(range(value.dim() - len(shape)))
    inner = _scaled(gradient, weight, None)
    return (
        _projected(call, inner, plain, rstd, dims, is_centred=False) if mask[0] else None,
        _summed(aten.mul.Tensor(gradient, plain), rest) if mask[1] else None,
    )


def batch_norm(call: Replaced) -> Any:
    """Stand for `native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)`.

    The running statistics move towards the batch's mean and inverse deviation on grids.
    """
    value, weight, bias, running_mean, running_var, training, momentum = call.args[:7]
    if not training:
        return NotImplemented
    plain, mean, rstd = call.func(value, None, None, None, None, True, 0.0, EPSILON)
    deviation, share = _deviation(rstd), nearest_power(momentum or 1.0)
    for running, seen in ((running_mean, normal(mean)), (running_var, deviation)):
        if running is not None:
            kept = aten.mul.Tensor(running, 1.0 - share)
            running.copy_(aten.add.Tensor(kept, aten.mul.Tensor(seen, share)))
    scaled = _scaled(normal(plain), _by_channel(value, weight), _by_channel(value, bias))
    return scaled, mean, deviation


def batch_norm_backward(call: Replaced) -> Any:
    """Stand for its backward."""
    value, weight, _mean, _var, _saved, deviation, training, _eps, mask = call.args[1:]
    if not training:
        return NotImplemented
    gradient = call.gradient
    plain = normal(
        aten.native_batch_norm.default(value, None, None, None, None, True, 0.0, EPSILON)[0]
    )
    dims = [0, *range(2, value.dim())]
    inner = _scaled(gradient, _by_channel(value, weight), None)
    rstd = aten.view.default(deviation, _channel_shape(value))
    return (
        _projected(call, inner, plain, rstd, dims, is_centred=True) if mask[0] else None,
        _summed(aten.mul.Tensor(gradient, plain), dims) if mask[1] else None,
        _summed(gradient, dims) if mask[2] else None,
    )


def _by_channel(value: Tensor, channels: Tensor | None) -> Tensor | None:
    """Return [channels] shaped to multiply a value of [batch, channels, ...]."""
    if channels is None:
        return None
    return aten.view.default(channels, _channel_shape(value))


def _channel_shape(value: Tensor) -> list[int]:
    return [1, -1, *[1] * (value.dim() - 2)]


def attention(call: Replaced) -> Any:
    """Stand for `_scaled_dot_product_flash_attention_for_cpu`: [batch, heads, tokens, size].

    The second result, which only the backward kernel reads, is zeros [batch, heads, tokens].
    """
    query, key, value = _factors(call.args[:3])
    rest = call.args[3:]
    if any(rest[:1]):
        return NotImplemented  # dropout, drawn inside the kernel
    share, _ = _shares(query, key, any(rest[1:]), call.kwargs)
    return _product(share, value), aten.zeros_like.default(aten.select.int(query, -1, 0))


def attention_backward(call: Replaced) -> Any:
    """Stand for its backward: gradients of query, key and value."""
    query, key, value = _factors(call.args[1:4])
    dropout, is_causal = call.args[6:]
    if dropout:
        return NotImplemented
    gradient, coarse = call.gradient, call.gradients.coarse
    share, scale = _shares(query, key, is_causal, call.kwargs)
    outer = coarse(_product(gradient, _turned(value)))
    own = aten._softmax_backward_data.default(outer, share, share.dim() - 1, share.dtype)
    own = coarse(aten.mul.Tensor(own, scale))
    return (
        coarse(_product(own, key)),
        coarse(_product(_turned(own), query)),
        coarse(_product(_turned(share), gradient)),
    )


def _factors(values: Sequence[Tensor]) -> list[Tensor]:
    """Return what attention multiplies, with few bits."""
    return [rounded(value, FACTOR_GRID, FACTOR_LIMIT) for value in values]


def _shares(
    query: Tensor, key: Tensor, is_causal: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, float]:
    """Return attention on the grid of probabilities, [..., tokens, tokens], and the scale."""
    given = kwargs.get("scale")
    scale = nearest_power(given if given is not None else 1.0 / math.sqrt(query.shape[-1]))
    scores = aten.mul.Tensor(_product(query, _turned(key)), scale)
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        scores = aten.masked_fill.Scalar(scores, aten.logical_not.default(mask), -math.inf)
    elif mask is not None:
        scores = aten.add.Tensor(scores, mask)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = aten.masked_fill.Scalar(scores, aten.triu.default(ones, 1), -math.inf)
    return probability(aten._softmax.default(scores, scores.dim() - 1, False)), scale


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the batched matrix product of [batch, heads, n, k] and [batch, heads, k, m]."""
    lead = list(left.shape[:-2])
    flat = [
        aten._unsafe_view.default(
            aten.clone.default(side, memory_format=torch.contiguous_format),
            [math.prod(lead), *side.shape[-2:]],
        )
        for side in (left, right)
    ]
    return aten.view.default(aten.bmm.default(*flat), [*lead, left.shape[-2], right.shape[-1]])


def _turned(value: Tensor) -> Tensor:
    return aten.transpose.int(value, -2, -1)


def _scaled(value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `value * weight + bias`, each left out where it is None."""
    if weight is not None:
        value = aten.mul.Tensor(value, weight)
    return value if bias is None else aten.add.Tensor(value, bias)


def _projected(
    call: Replaced,
    gradient: Tensor,
    plain: Tensor,
    rstd: Tensor,
    dims: Sequence[int],
    *,
    is_centred: bool,
) -> Tensor:
    """Return a normalisation's gradient of its input.

    Args:
        call: The backward call.
        gradient: Of the normalised value, weight included.
        plain: The normalised value.
        rstd: Inverse deviation, 1 along `dims`.
        dims: What was normalised over.
        is_centred: Whether a mean was subtracted.
    """
    coarse = call.gradients.coarse
    along = coarse(scaled_sum(aten.mul.Tensor(gradient, plain), dims))
    rest = aten.sub.Tensor(gradient, aten.mul.Tensor(plain, along))
    if is_centred:
        rest = aten.sub.Tensor(rest, coarse(scaled_sum(gradient, dims)))
    return coarse(aten.mul.Tensor(rest, rstd))


def _deviation(rstd: Tensor) -> Tensor:
    """Return the power of two nearest to an inverse deviation, within a factor 2 of 1."""
    return aten.clamp.default(power_of_two(rstd), 0.5, 2.0)


def _summed(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over leading dims, which are dropped."""
    return aten.sum.dim_IntList(value, list(dims), False) if dims else value
