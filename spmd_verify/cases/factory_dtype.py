"""Run a step as if the case's dtype were the default dtype, without changing the default.

A model written for float32 makes its initial states and masks by factory calls that name
no dtype. In a float64 case those would be float32 and meet float64 parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from spmd_verify.backward_mode import backward_inside

FACTORIES: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty,
        torch.eye,
        torch.arange,
        torch.linspace,
        torch.tensor,
        torch.rand,
        torch.randn,
    }
)


class FactoryDtype(TorchFunctionMode):
    """Give floating results of factory calls without a dtype the case's dtype.

    Calls that name a dtype, and those whose result is not floating (`arange(n)`,
    `full(size, True)`), are left alone.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Set the dtype that stands in for the default one."""
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add `dtype` to factory calls that would give the default dtype."""
        named = dict(kwargs or {})
        if func is torch.Tensor.backward:
            return backward_inside(self, args, named)
        if (
            func in FACTORIES
            and named.get("dtype") is None
            and self._is_floating(func, args, named)
        ):
            named["dtype"] = self.dtype
        return func(*args, **named)

    def _is_floating(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Say whether the call would give the default dtype."""
        if func is torch.tensor:
            value = args[0] if args else kwargs.get("data")
            return not isinstance(value, torch.Tensor) and _holds_float(value)
        if func is torch.arange:
            return any(isinstance(value, float) for value in [*args, *kwargs.values()])
        if func is torch.full:
            fill = args[1] if len(args) > 1 else kwargs.get("fill_value")
            return isinstance(fill, float)
        return True


def _holds_float(value: Any) -> bool:
    """Say whether a nested list of numbers gives the default dtype in `torch.tensor`."""
    if isinstance(value, (list, tuple)):
        return any(_holds_float(member) for member in value)
    return isinstance(value, float)
