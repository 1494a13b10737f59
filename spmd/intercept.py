"""Operators replaced while the step is traced: data-dependent sizes and fused optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from spmd import ctc

aten = torch.ops.aten
own = torch.ops.spmd

Real = Callable[[Tensor], Tensor]


def _measured(measure: Callable[..., Any], *values: Tensor) -> int:
    """Return a number that real values give, out of sight of the tracer and of fakes."""
    with _disable_current_modes(), unset_fake_temporarily():
        return int(measure(*values))


def sized_call(func: Any, args: Any, kwargs: Any, real: Real) -> Any:
    """Run the sized twin of a data-dependent operator, or return NotImplemented.

    Args:
        func: The operator being dispatched.
        args: Its positional arguments, fake tensors.
        kwargs: Its keyword arguments.
        real: Gives the real value of a fake tensor; called only for such operators.
    """
    handler = _SIZED.get(func)
    return handler(*args, real=real, **kwargs) if handler else NotImplemented


def _nonzero(x: Tensor, *, real: Real) -> Tensor:
    return own.nonzero(x, _measured(torch.count_nonzero, real(x)))


def _masked_select(x: Tensor, mask: Tensor, *, real: Real) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return aten.index.Tensor(x, list(_nonzero(mask, real=real).unbind(1)))


def _long_indices(indices: Any, real: Real) -> list[Tensor | None]:
    """Replace boolean masks among advanced indices by the index vectors they stand for."""
    out: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            out.extend(_nonzero(index, real=real).unbind(1))
        else:
            out.append(index)
    return out


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _index(x: Tensor, indices: Any, *, real: Real) -> Any:
    if not _has_mask(indices):
        return NotImplemented
    return aten.index.Tensor(x, _long_indices(indices, real))


def _put(op: Any) -> Callable[..., Any]:
    def handler(
        x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *rest: Any, real: Real
    ) -> Any:
        if not _has_mask(indices):
            return NotImplemented
        mask = _fill_mask(x, indices, values)
        if mask is None or accumulate:
            return op(x, _long_indices(indices, real), values, accumulate, *rest)
        filled = torch.where(mask, values, x)
        return x.copy_(filled) if op._schema.is_mutable else filled

    return handler


def _fill_mask(x: Tensor, indices: Any, values: Tensor) -> Tensor | None:
    """Return the mask of `x[mask] = values`, to broadcast with x, if no size depends on it.

    That is so where every marked place gets the same values.
    """
    given = [i for i in indices if i is not None]
    after = x.dim() - len(indices) + 1 - given[0].dim()
    if len(given) != 1 or indices[-1] is not given[0]:
        return None
    if values.dim() > after and values.numel() != 1:
        return None
    mask: Tensor = given[0].to(torch.bool)
    return mask.reshape([*mask.shape, *[1] * after])


def _unique2(
    x: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    real: Real,
) -> Any:
    size = _measured(lambda v: torch.unique(v).shape[0], real(x))
    return own.unique(x, None, False, sorted, size)


def _unique_dim(
    x: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    real: Real,
) -> Any:
    size = _measured(lambda v: torch.unique(v, dim=dim).shape[dim], real(x))
    return own.unique(x, dim, False, sorted, size)


def _unique_consecutive(
    x: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
    *,
    real: Real,
) -> Any:
    size = _measured(lambda v: torch.unique_consecutive(v, dim=dim).shape[dim or 0], real(x))
    return own.unique(x, dim, True, True, size)


def _repeat_interleave(repeats: Tensor, *, output_size: int | None = None, real: Real) -> Tensor:
    size = output_size if output_size is not None else _measured(torch.sum, real(repeats))
    return own.repeat_interleave(repeats, size)


def _bincount(
    x: Tensor, weights: Tensor | None = None, minlength: int = 0, *, real: Real
) -> Tensor:
    largest = _measured(lambda v: v.max() + 1 if v.numel() else 0, real(x))
    size = max(largest, minlength)
    return own.bincount(x, weights, minlength, size)


def _ctc_loss(*args: Any, real: Real) -> Any:
    return ctc.traced_forward(*args, measure=_measured, real=real)


def _ctc_loss_backward(*args: Any, real: Real) -> Any:
    return ctc.traced_backward(*args)


_SIZED: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.index_put.default: _put(aten.index_put.default),
    aten.index_put_.default: _put(aten.index_put_.default),
    aten._index_put_impl_.default: _put(aten._index_put_impl_.default),
    aten._unique2.default: _unique2,
    aten.unique_dim.default: _unique_dim,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}


def fused_optimizer(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a fused in-place optimizer as its functional form and copies, or NotImplemented.

    Functionalization asserts on the in-place form. The functional form is the same kernel
    on clones, so the numbers are the same bits.
    """
    functional = _FUSED.get(func)
    if functional is None:
        return NotImplemented
    schema = func._schema
    names = [a.name for a in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    outs = functional(**given)
    for name, new in zip(written, outs, strict=True):
        for old_tensor, new_tensor in zip(given[name], new, strict=True):
            old_tensor.copy_(new_tensor)
    return None


_FUSED = {
    getattr(getattr(aten, f"{name}_"), overload): getattr(getattr(aten, name), overload)
    for name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
    for overload in ("default", "tensor_lr")
    if hasattr(getattr(aten, f"{name}_", None), overload)
}
