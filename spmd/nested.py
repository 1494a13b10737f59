"""Nested tensors are refused where the step makes or meets one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from spmd.errors import CaptureError
from spmd.source_lines import user_line

_MAKERS = (torch._nested_view_from_jagged, torch._nested_tensor_from_tensor_list)


def is_nested(func: Any, args: Any) -> bool:
    """Say whether a function makes or gets a nested tensor."""
    return func in _MAKERS or any(isinstance(a, Tensor) and a.is_nested for a in args)


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """Raise.

    Raises:
        CaptureError: `nested-tensor`, with the user's line.
    """
    raise CaptureError(
        "nested tensors cannot be captured: their sizes are values. Use a padded tensor and a "
        "mask, or packed sequences.",
        user_line(),
        "nested-tensor",
    )


@contextmanager
def nested_refused() -> Iterator[None]:
    """Refuse the making of jagged tensors: their sizes confuse the tracer before it sees them."""
    original = NestedTensor.__new__
    type.__setattr__(NestedTensor, "__new__", staticmethod(refuse))
    try:
        yield
    finally:
        type.__setattr__(NestedTensor, "__new__", staticmethod(original))
