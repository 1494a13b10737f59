"""Operators and functions traced as others that say the same and can be divided.

`substitute` works below autograd, on operators whose functional form differs from what
eager does or hides its memory order. `Substitutes` works above autograd, on functions of
`torch.nn.functional` whose kernels see the batch as one piece: composed of plain
operators, forward and backward follow the batch's split by the ordinary rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spmd.nested import is_nested, refuse
from spmd.packed import FUNCTIONS as PACKED
from spmd.python_values import MADE_OF_NUMBERS

aten = torch.ops.aten
own = torch.ops.spmd


# aten.bernoulli.p, the functional form of bernoulli_, draws into a contiguous tensor; the
# in-place form draws in the memory order of its tensor: another mask where the two differ.
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("bernoulli(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _bernoulli(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(p)


_library.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")
torch.library.register_fake("spmd::bernoulli", lambda x, p: torch.empty_like(x), lib=_library)


def substitute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the stand-in of an operator, or return NotImplemented."""
    stand_in = _OPERATORS.get(func)
    return stand_in(*args, **kwargs) if stand_in else NotImplemented


def _bernoulli_(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    if generator is not None:
        return NotImplemented
    return x.copy_(own.bernoulli(x, p))


def _normal(mean: Any, std: Any, *, generator: Any = None) -> Any:
    """A standard draw, scaled: what the kernel does, without reading mean and std to draw."""
    if generator is not None:
        return NotImplemented
    like = mean if isinstance(mean, Tensor) else std
    both = torch.broadcast_shapes(getattr(mean, "shape", ()), getattr(std, "shape", ()))
    draw = torch.empty(both, dtype=like.dtype, device=like.device).normal_()
    return draw * std + mean


def _fill_diagonal_(x: Tensor, value: float, wrap: bool = False) -> Any:
    """Where all indices agree; the operator itself reaches through the strides."""
    if wrap and x.dim() == 2 and x.shape[0] > x.shape[1]:
        return NotImplemented
    first = torch.arange(x.shape[0], device=x.device).view([-1] + [1] * (x.dim() - 1))
    diagonal = torch.ones([1] * x.dim(), dtype=torch.bool, device=x.device)
    for dim in range(1, x.dim()):
        shape = [1] * x.dim()
        shape[dim] = -1
        same = first == torch.arange(x.shape[dim], device=x.device).view(shape)
        diagonal = diagonal & same
    return x.masked_fill_(diagonal, value)


_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _bernoulli_,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.fill_diagonal_.default: _fill_diagonal_,
}


class Substitutes(TorchFunctionMode):
    """Replaces functions while a step is traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the stand-in of `func`, or `func`.

        Raises:
            CaptureError: `nested-tensor`.
        """
        if is_nested(func, args):
            refuse()
        stand_in = _FUNCTIONS.get(func) or MADE_OF_NUMBERS.get(func)
        return (stand_in or func)(*args, **(kwargs or {}))


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean",
    sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Look up rows and reduce each bag; bags of one width stay one dim of the batch.

    `scale_grad_by_freq` keeps torch's operator: its CPU kernel (torch 2.13) divides by the
    counts of other rows than it says, and one device is the specification.
    """
    if scale_grad_by_freq:
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, True, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        counted = torch.ones_like(input, dtype=torch.bool)
    else:
        counted = input != padding_idx % weight.shape[0]
    if input.dim() == 2:
        return _same_width(rows, counted, mode, padding_idx is not None)
    assert offsets is not None
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype)
    bags = torch.searchsorted(starts.contiguous(), positions, right=True) - 1
    return _by_bag(rows, counted, bags, starts.shape[0], mode)


def _same_width(rows: Tensor, counted: Tensor, mode: str, padded: bool) -> Tensor:
    if mode == "max":
        if not padded:
            return rows.max(1).values
        lowest = rows.masked_fill(~counted.unsqueeze(-1), float("-inf")).max(1).values
        return lowest.masked_fill(~counted.any(1, keepdim=True), 0.0)
    if padded:
        rows = rows.masked_fill(~counted.unsqueeze(-1), 0.0)
    if mode == "sum":
        return rows.sum(1)
    if not padded:
        return rows.mean(1)
    return rows.sum(1) / counted.sum(1, keepdim=True).clamp(min=1)


def _by_bag(rows: Tensor, counted: Tensor, bags: Tensor, count: int, mode: str) -> Tensor:
    if mode == "max":
        rows = rows.masked_fill(~counted.unsqueeze(-1), float("-inf"))
        index = bags.unsqueeze(-1).expand_as(rows)
        empty = rows.new_full((count, rows.shape[1]), float("-inf"))
        out = empty.scatter_reduce(0, index, rows, "amax")
        return out.masked_fill(out == float("-inf"), 0.0)
    rows = rows.masked_fill(~counted.unsqueeze(-1), 0.0)
    out = rows.new_zeros(count, rows.shape[1]).index_add(0, bags, rows)
    if mode == "sum":
        return out
    sizes = rows.new_zeros(count).index_add(0, bags, counted.to(rows.dtype))
    return out / sizes.clamp(min=1).unsqueeze(-1)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _reduction(size_average: Any, reduce: Any, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Hinge of every other class against the target's."""
    rows = input.unsqueeze(0) if input.dim() == 1 else input
    index = target.reshape(-1, 1)
    violation = (margin - rows.gather(1, index) + rows).clamp(min=0)
    if p != 1:
        violation = violation * violation
    if weight is not None:
        violation = violation * weight[index]
    other = torch.arange(rows.shape[1], device=rows.device) != index
    loss = (violation * other).sum(1) / rows.shape[1]
    chosen = _reduction(size_average, reduce, reduction)
    return _reduced(loss[0] if input.dim() == 1 else loss, chosen)


def _multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Hinge of every class that is no target against every target up to the first -1."""
    rows, labels = (x.unsqueeze(0) if input.dim() == 1 else x for x in (input, target))
    valid = (labels < 0).cumsum(1) == 0
    classes = torch.arange(rows.shape[1], device=rows.device)
    index = labels.clamp(min=0)
    is_target = ((index.unsqueeze(-1) == classes) & valid.unsqueeze(-1)).any(1)
    margins = 1 - rows.gather(1, index).unsqueeze(-1) + rows.unsqueeze(1)
    counted = valid.unsqueeze(-1) & ~is_target.unsqueeze(1)
    loss = (margins.clamp(min=0) * counted).sum((1, 2)) / rows.shape[1]
    chosen = _reduction(size_average, reduce, reduction)
    return _reduced(loss[0] if input.dim() == 1 else loss, chosen)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.embedding_bag: _embedding_bag,
    F.multi_margin_loss: _multi_margin_loss,
    F.multilabel_margin_loss: _multilabel_margin_loss,
    **PACKED,
}
