"""Operators of the engine's own: gradient markers and sized twins of data-dependent operators.

A sized twin takes the size its first capture saw and raises `SizeChanged` when the data
asks for another one; that makes a data-dependent shape a static shape with a guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmd.errors import SizeChanged

_library = torch.library.Library("spmd", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the operator `spmd::<schema>` with its kernel and its shapes."""
    name = schema.split("(")[0]
    _library.define(schema, tags=())
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmd::{name}", fake, lib=_library)


def _clone(x: Tensor, name: str) -> Tensor:
    return x.clone()


define("mark_gradient(Tensor x, str name) -> Tensor", _clone, _clone)


def _check(what: str, expected: int, actual: int) -> None:
    if expected != actual:
        raise SizeChanged(what, expected, actual)


def _nonzero(x: Tensor, size: int) -> Tensor:
    out = torch.nonzero(x)
    _check("nonzero", size, out.shape[0])
    return out


define(
    "nonzero(Tensor x, SymInt size) -> Tensor",
    _nonzero,
    lambda x, size: x.new_empty((size, x.dim()), dtype=torch.int64),
)


def _repeat_interleave(repeats: Tensor, size: int) -> Tensor:
    _check("repeat_interleave", size, int(repeats.sum()))
    return torch.repeat_interleave(repeats)


define(
    "repeat_interleave(Tensor repeats, SymInt size) -> Tensor",
    _repeat_interleave,
    lambda repeats, size: repeats.new_empty((size,)),
)


def _bincount(x: Tensor, weights: Tensor | None, minlength: int, size: int) -> Tensor:
    out = torch.bincount(x, weights, minlength)
    _check("bincount", size, out.shape[0])
    return out


def _fake_bincount(x: Tensor, weights: Tensor | None, minlength: int, size: int) -> Tensor:
    if weights is None:
        return x.new_empty((size,), dtype=torch.int64)
    dtype = weights.dtype if weights.dtype == torch.float32 else torch.float64
    return x.new_empty((size,), dtype=dtype)


define(
    "bincount(Tensor x, Tensor? weights, int minlength, SymInt size) -> Tensor",
    _bincount,
    _fake_bincount,
)


def _unique(x: Tensor, dim: int | None, consecutive: bool, sort: bool, size: int) -> Any:
    if consecutive:
        out = torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=dim)
    else:
        out = torch.unique(x, sorted=sort, return_inverse=True, return_counts=True, dim=dim)
    _check("unique", size, out[0].shape[dim or 0])
    return tuple(out)


def _fake_unique(x: Tensor, dim: int | None, consecutive: bool, sort: bool, size: int) -> Any:
    if dim is None:
        values = x.new_empty((size,))
        inverse = x.new_empty(x.shape, dtype=torch.int64)
    else:
        shape = list(x.shape)
        shape[dim] = size
        values = x.new_empty(shape)
        inverse = x.new_empty((x.shape[dim],), dtype=torch.int64)
    return values, inverse, x.new_empty((size,), dtype=torch.int64)


define(
    "unique(Tensor x, int? dim, bool consecutive, bool sort, SymInt size)"
    " -> (Tensor, Tensor, Tensor)",
    _unique,
    _fake_unique,
)

SIZED = frozenset(
    getattr(torch.ops.spmd, name).default
    for name in ("nonzero", "repeat_interleave", "bincount", "unique")
)


def check_value(expression: str, expected: bool | int | float, *values: float) -> None:
    """Raise SizeChanged unless the guarded expression still has its captured value.

    Args:
        expression: Python expression over `v0`, `v1`, ... written by the capture.
        expected: Its value at capture.
        values: Current values of the symbols.
    """
    scope = {f"v{i}": value for i, value in enumerate(values)}
    actual = eval(expression, _GUARD_SCOPE, scope)
    if actual != expected:
        raise SizeChanged(expression, expected, actual)


_MATH = ("sqrt", "exp", "log", "log2", "cos", "sin", "tan", "cosh", "sinh", "tanh", "acos", "asin",
         "atan")  # fmt: skip


def _guard_scope() -> dict[str, Any]:
    import math

    from torch.utils._sympy import functions

    names = {name: getattr(math, name) for name in dir(math) if not name.startswith("_")}
    names |= {
        "FloorDiv": lambda a, b: a // b,
        "Mod": lambda a, b: a % b,
        "PythonMod": lambda a, b: a % b,
        "ToFloat": float,
        "TruncToInt": math.trunc,
        "FloatTrueDiv": lambda a, b: a / b,
        "IntTrueDiv": lambda a, b: a / b,
        "FloatPow": lambda a, b: float(a) ** float(b),
        "PowByNatural": lambda a, b: a**b,
        "Max": max,
        "Min": min,
        "Abs": abs,
        "Eq": lambda a, b: a == b,
        "Ne": lambda a, b: a != b,
        "Not": lambda a: not a,
        "And": lambda *a: all(a),
        "Or": lambda *a: any(a),
    }
    names |= {f"OpaqueUnaryFn_{n}": getattr(math, n) for n in _MATH}
    assert functions is not None
    return {"__builtins__": {"True": True, "False": False}} | names


_GUARD_SCOPE = _guard_scope()
