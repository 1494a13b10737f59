"""Operators the capture takes apart, so that what they sum over the batch is explicit.

Optimizer arithmetic is never decomposed: it has to equal eager to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from spmd.normalization import native_batch_norm, native_batch_norm_backward

aten = torch.ops.aten


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if x.dim() == 0:
        return x.to(dtype) if dtype is not None else x.clone()
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    return torch.sum(x, dims, keepdim, dtype=dtype) / count


def _mean_all(x: Tensor, *, dtype: Any = None) -> Tensor:
    return torch.sum(x, dtype=dtype) / x.numel()


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two passes: the mean, then the squares of what is left; both are sums over the dims."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = torch.sum(x, dims, True) / count
    left = x - mean
    squares = left.abs().square() if x.is_complex() else left * left
    var = torch.sum(squares, dims, keepdim) / max(
        count - (1 if correction is None else correction), 0
    )
    return var, mean if keepdim else mean.squeeze(dims)


def _var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), mean


def _foreach_norm(tensors: list[Tensor], order: float = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors]


def _norm(
    x: Tensor, order: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    return torch.linalg.vector_norm(
        x, 2 if order is None else order, dim or None, keepdim, dtype=dtype
    )


def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale the rows that are looked up and too long; each rank marks the rows it looks up."""
    marks = weight.new_zeros(weight.shape[0])
    ones = marks.new_ones(indices.numel())
    marks = marks.index_put((indices.reshape(-1),), ones, accumulate=True)
    norms = torch.linalg.vector_norm(weight, norm_type, 1)
    scale = torch.where((marks > 0) & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    return weight * scale.unsqueeze(1)


TABLE: dict[Any, Any] = dict(
    get_decompositions(
        [
            aten._native_batch_norm_legit,
            aten._native_batch_norm_legit_functional,
            aten._native_batch_norm_legit_no_training,
            aten._batch_norm_with_update,
            aten._batch_norm_with_update_functional,
            aten._batch_norm_no_update,
            aten.batch_norm_backward,
            aten.nll_loss_forward,
            aten.nll_loss_backward,
            aten.nll_loss2d_forward,
            aten.nll_loss2d_backward,
            aten.mse_loss,
            aten.mse_loss_backward,
            aten.smooth_l1_loss,
            aten.smooth_l1_loss_backward,
            aten.huber_loss,
            aten.huber_loss_backward,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits,
            aten.soft_margin_loss,
            aten.soft_margin_loss_backward,
            aten.native_dropout_backward,
            aten.logsumexp,
            aten.rot90,
            aten.diag_embed,
            aten.aminmax,
            aten.glu,
            aten.glu_backward,
        ]
    )
) | {
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten.mean.default: _mean_all,
    aten.mean.dim: _mean,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.std.correction: _std,
    aten.std_mean.correction: _std_mean,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dtype: lambda x, order, *, dtype: _norm(x, order, dtype=dtype),
    aten.norm.ScalarOpt_dim_dtype: lambda x, order, dim, keepdim, *, dtype: _norm(
        x, order, dim, keepdim, dtype
    ),
    aten.norm.Scalar: _norm,
    aten.embedding_renorm.default: _embedding_renorm,
}
