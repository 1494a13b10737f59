"""Functions local graphs call at run time, beside operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def unless_empty(
    empty: int,
    target: Any,
    outputs: list[Any],
    single: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `target`, or make its outputs without it where this rank's part is empty.

    Args:
        empty: Whether this rank's part has no elements.
        target: The operator.
        outputs: Per output (local sizes, dtype, value of an empty reduction) or None.
        single: Whether the operator returns one tensor rather than a tuple.
        args: Its local positional arguments.
        kwargs: Its local keyword arguments.
    """
    if not empty:
        return target(*args, **kwargs)
    device = next(a.device for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor))
    made = [None if o is None else _filled(o[0], o[1], o[2], device) for o in outputs]
    return made[0] if single else tuple(made)


def _filled(sizes: list[int], dtype: torch.dtype, fill: float, device: torch.device) -> Tensor:
    if fill and not dtype.is_floating_point:
        limits = torch.iinfo(dtype) if dtype != torch.bool else None
        fill = (limits.min if fill < 0 else limits.max) if limits else fill > 0
    return torch.full(sizes, fill, dtype=dtype, device=device)


def first_rank_only(x: Tensor, coordinate: int) -> Tensor:
    """Return `x` on rank 0 of an axis and zeros elsewhere: a replicated value as a sum."""
    return x if coordinate == 0 else torch.zeros_like(x)


def own_rows(weight: Tensor, index: Tensor, first: int, rows: int) -> Tensor:
    """Return the rows of an embedding that this rank has, and zeros for all others.

    Args:
        weight: This rank's rows [own, width].
        index: Which rows, counted over all ranks.
        first: Number of the first one this rank has.
        rows: Number of rows over all ranks; an index outside is refused as on one device.
    """
    torch._assert_async(((index >= 0) & (index < rows)).all(), "embedding: index out of range")
    local = index - first
    is_elsewhere = (local < 0) | (local >= weight.shape[0])
    if not weight.shape[0]:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    found = torch.ops.aten.embedding.default(weight, local.masked_fill(is_elsewhere, 0))
    return found.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def own_rows_backward(
    gradient: Tensor, index: Tensor, first: int, own: int, padding: int
) -> Tensor:
    """Return the gradient of an embedding's rows [first, first + own)."""
    local = index - first
    is_dropped = (local < 0) | (local >= own) | (index == padding)
    # What is dropped goes to one row more, which is cut off.
    target = local.masked_fill(is_dropped, own)
    return torch.ops.aten.embedding_dense_backward.default(gradient, target, own + 1, -1, False)[
        :own
    ]


def _laid_out(x: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    base = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    return base.copy_(x)


def read_strided(
    x: Tensor, shape: list[int], strides: list[int], size: list[int], stride: list[int], offset: int
) -> Tensor:
    """Return `as_strided(size, stride, offset)` of `x` laid out with `shape` and `strides`."""
    return _laid_out(x, shape, strides).as_strided(size, stride, offset)


def write_strided(
    x: Tensor, source: Tensor, shape: list[int], strides: list[int], size: list[int],
    stride: list[int], offset: int,
) -> Tensor:  # fmt: skip
    """Return `x`, laid out with `shape` and `strides`, with `source` written at a stride."""
    base = _laid_out(x, shape, strides)
    base.as_strided(size, stride, offset).copy_(source)
    return base
