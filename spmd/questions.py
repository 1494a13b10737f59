"""Questions a step's Python asks about the value of a tensor.

A library's question is answered from real values, and the answer guards the graph. The
user's is refused with its line: one graph cannot stand for both answers. torch asks these
in C++, where only a function mode above autograd sees who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from spmd.errors import CaptureError
from spmd.source_lines import noted, refuse_users_question, user_line

_ANSWERED: frozenset[Any] = frozenset(
    (
        Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__,
        Tensor.__contains__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero,
        torch.equal, torch.allclose, torch.is_nonzero,
    )
)  # fmt: skip
_LEAVES_TORCH: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))


class Questions(TorchFunctionMode):
    """Refuses the user's questions about traced tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` unless it is such a question."""
        if func in _ANSWERED and not _is_constant(args):
            refuse_users_question(func.__name__)
        elif func in _LEAVES_TORCH and isinstance(args[0], FakeTensor):
            raise noted(
                CaptureError(
                    "the step hands a tensor to NumPy or another library, where the trace ends. "
                    "Compute with torch, or do this outside the step.",
                    user_line(),
                    "leaves-torch",
                )
            )
        return func(*args, **(kwargs or {}))


def _is_constant(args: Any) -> bool:
    tensors = [x for x in args if isinstance(x, Tensor)]
    return all(isinstance(x, FakeTensor) and x.constant is not None for x in tensors)


def untraceable(func: Any, error: Exception) -> CaptureError:
    """Return the error for an operator whose result no fake tensor can stand for."""
    return noted(
        CaptureError(
            f"operator {func} cannot be traced: its result depends on the values of its inputs "
            f"({type(error).__name__}). Use another operator, or do this outside the step.",
            user_line(),
            "operator-not-traceable",
        )
    )


@contextmanager
def printable_numbers() -> Iterator[None]:
    """Let the step format numbers it does not know: a log line must not end the capture."""
    original: Callable[..., str] | None = vars(torch.SymFloat).get("__format__")
    torch.SymFloat.__format__ = lambda self, spec: "traced"  # type: ignore[method-assign]
    try:
        yield
    finally:
        if original is None:
            del torch.SymFloat.__format__
        else:
            torch.SymFloat.__format__ = original  # type: ignore[method-assign]


@contextmanager
def compiled_as_written() -> Iterator[None]:
    """Trace `torch.compile`d functions as they are written; Dynamo refuses to be traced."""
    from torch._dynamo import config  # the tracer has imported it already

    before = config.error_on_nested_fx_trace
    config.error_on_nested_fx_trace = False
    try:
        yield
    finally:
        config.error_on_nested_fx_trace = before
