"""Tensors made of symbolic numbers, and assignments to `.data`, as a trace can record them.

`torch.tensor(number)` asks a symbol for its value, which would bake it; `x.data = y`
changes what x is without an operator the tracer sees.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spmd.errors import CaptureError
from spmd.source_lines import user_line

_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)


def _tensor_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` (`torch.tensor`, `torch.as_tensor`) that takes symbols as they are."""

    def made(data: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        if not _has_symbol(data):
            return original(data, *args, dtype=dtype, **kwargs)
        dtype = dtype or (torch.int64 if _all_integers(data) else torch.get_default_dtype())
        tensor = _stacked(data, dtype, kwargs.get("device"))
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor

    return made


def _has_symbol(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(_has_symbol(item) for item in data)
    return isinstance(data, _NUMBERS)


def _all_integers(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return all(_all_integers(item) for item in data)
    return isinstance(data, int | torch.SymInt)


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(item, dtype, device) for item in data])
    if isinstance(data, Tensor):
        return data.to(dtype)
    return torch.scalar_tensor(data, dtype=dtype, device=device)


def _set_data(x: Tensor, new: Tensor) -> None:
    """Write the values in place of `x.data = new`; what shares memory with x sees them too."""
    if new.shape != x.shape or new.dtype != x.dtype:
        raise CaptureError(
            f"the step assigns .data of shape {list(new.shape)} and {new.dtype} to a tensor of "
            f"shape {list(x.shape)} and {x.dtype}. Only values of the same shape and dtype can be "
            "written inside a step.",
            user_line(),
            "data-assignment",
        )
    with torch.no_grad():
        x.detach().copy_(new.detach())


MADE_OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor_of(torch.tensor),
    torch.as_tensor: _tensor_of(torch.as_tensor),
    torch.asarray: _tensor_of(torch.asarray),
    Tensor.data.__set__: _set_data,
}


@contextmanager
def symbolic_functions() -> Iterator[None]:
    """Let `max`, `min` and functions of `math` take symbols without asking their value.

    An optimizer's `max(1.0, ratio)` or `math.sqrt(1 - beta ** step)` is then a node of the
    graph; asked for a value, it would be a constant with a guard, another one every step.
    Given anything but symbols the functions do what they always do.
    """
    originals = {(module, name): getattr(module, name) for module, name in _SYMBOLIC}
    for (module, name), stand_in in _SYMBOLIC.items():
        setattr(module, name, _when_symbolic(originals[module, name], stand_in))
    try:
        yield
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def _when_symbolic(
    original: Callable[..., Any], stand_in: Callable[..., Any]
) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and any(isinstance(a, _NUMBERS) for a in args) and _all_numbers(args):
            return functools.reduce(stand_in, args) if len(args) > 1 else stand_in(*args)
        return original(*args, **kwargs)

    return function


def _all_numbers(values: Any) -> bool:
    return all(isinstance(v, (int, float, *_NUMBERS)) for v in values)


# torch's functions of symbols are private but for sqrt; each calls the `math` function of
# its name when the graph runs (torch 2.13).
_SYMBOLIC: dict[tuple[Any, str], Callable[..., Any]] = {
    (builtins, "max"): torch.sym_max,
    (builtins, "min"): torch.sym_min,
} | {
    (math, name): getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin", "atan",
                 "exp", "log2", "log")
    if hasattr(torch, f"_sym_{name}")
}  # fmt: skip
