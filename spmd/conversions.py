"""Conversions inside a traced step that fakes answer in another way than real tensors.

`Module._apply` swaps fake parameters even if they already are what is asked for, and a
swap fails while anything refers to them weakly, as gradient hooks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmd.errors import CaptureError
from spmd.source_lines import user_line


@contextmanager
def idle_conversions() -> Iterator[None]:
    """Skip conversions that change nothing; refuse the others while the body runs."""
    original = nn.Module._apply

    def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        with torch.no_grad():
            converted = [function(tensor) for tensor in tensors]
        for before, after in zip(tensors, converted, strict=True):
            if (before.dtype, before.device) != (after.dtype, after.device):
                raise CaptureError(
                    f"the step converts {type(module).__name__} from {before.dtype} on "
                    f"{before.device} to {after.dtype} on {after.device}, which one graph cannot "
                    "do. Convert the module before the first step.",
                    user_line(),
                    "conversion-in-step",
                )
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class Formatted(TorchFunctionMode):
    """Format an integer tensor as eager does: by its value, which then guards the graph.

    `modules[f"expert_{index}"]` chooses a module by it. Numbers with a fraction are left
    alone: they are formatted for people, and would guard the graph at every call.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer `Tensor.__format__` of integers; everything else runs as it is."""
        if func is Tensor.__format__ and args[0].dim() == 0 and _is_integer(args[0]):
            return format(int(args[0].item()), *args[1:])
        return func(*args, **(kwargs or {}))


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
