"""Batch normalisation from plain operators, so that its statistics are sums over the batch.

The arithmetic is that of torch's CPU kernels, because another form rounds elsewhere and a
checker sees it: sums are accumulated in float64 for float32 inputs, the output is one
multiplication and one addition by alpha = weight / std and beta = bias - mean * alpha.
Source: ATen's batch norm kernels for CPU (acc_type, collect_linear_and_constant_terms).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten
_EVAL = get_decompositions([aten.native_batch_norm])[aten.native_batch_norm.default]
_EVAL_BACKWARD = get_decompositions([aten.native_batch_norm_backward])[
    aten.native_batch_norm_backward.default
]


def _accumulated(x: Tensor) -> Tensor:
    """Return `x` in the dtype its kernel sums in."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return x.to(torch.float64)
    return _opmath(x)


def _opmath(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def native_batch_norm(  # noqa: PLR0913  (the operator's own signature)
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return output, mean and 1/std; running statistics are updated in place.

    Args:
        x: Global [batch, channels, ...].
        weight: [channels] or None.
        bias: [channels] or None.
        running_mean: [channels] or None.
        running_var: [channels] or None.
        training: Whether the batch's statistics are used.
        momentum: Share of the batch in the running statistics.
        eps: Added to the variance.
    """
    if not training:
        return _EVAL(x, weight, bias, running_mean, running_var, training, momentum, eps)
    dims, shape = _dims(x), _shape(x)
    wide, count = _accumulated(x), x.numel() // x.shape[1]
    mean = torch.sum(wide, dims) / count
    left = wide - mean.view(shape)
    squares = torch.sum(left * left, dims)
    rstd = (1 / torch.sqrt(squares / count + eps)).to(_opmath(x).dtype)
    if running_mean is not None:
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
    if running_var is not None:
        unbiased = squares / max(count - 1, 1)
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)
    mean = mean.to(_opmath(x).dtype)
    alpha = rstd if weight is None else rstd * weight
    beta = -mean * alpha if bias is None else bias - mean * alpha
    out = _opmath(x) * alpha.view(shape) + beta.view(shape)
    kept = _kept_dtype(x, weight, running_mean)
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


def native_batch_norm_backward(  # noqa: PLR0913  (the operator's own signature)
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> Any:
    """Return the gradients of input, weight and bias, None where the mask says so.

    Args:
        grad: Global [batch, channels, ...], of the output.
        x: The input.
        weight: [channels] or None.
        running_mean: [channels] or None.
        running_var: [channels] or None.
        save_mean: [channels], from forward.
        save_invstd: [channels], from forward.
        train: Whether the batch's statistics were used.
        eps: Added to the variance.
        output_mask: Which of the three are wanted.
    """
    if not train or save_mean is None or save_invstd is None:
        return _EVAL_BACKWARD(
            grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
            output_mask,
        )  # fmt: skip
    dims, shape = _dims(x), _shape(x)
    count, dtype = x.numel() // x.shape[1], _opmath(x).dtype
    wide = _accumulated(grad)
    total = torch.sum(wide, dims)
    dot = torch.sum((_accumulated(x) - save_mean.view(shape)) * wide, dims)
    grad_input = None
    if output_mask[0]:
        factor = (dot * save_invstd * save_invstd / count).to(dtype)
        scale = save_invstd if weight is None else save_invstd * weight
        left = _opmath(x) - save_mean.view(shape)
        shift = (total / count).to(dtype).view(shape)
        grad_input = (_opmath(grad) - shift - left * factor.view(shape)) * scale.view(shape)
        grad_input = grad_input.to(x.dtype)
    kept = _kept_dtype(x, weight, running_mean)
    grad_weight = (dot * save_invstd).to(kept) if output_mask[1] else None
    grad_bias = total.to(kept) if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


def _kept_dtype(x: Tensor, weight: Tensor | None, running_mean: Tensor | None) -> torch.dtype:
    """Return the dtype of statistics and of parameter gradients: under autocast not the input's."""
    own = running_mean if weight is None else weight
    return x.dtype if own is None else own.dtype


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _shape(x: Tensor) -> list[int]:
    return [1, -1] + [1] * (x.dim() - 2)
