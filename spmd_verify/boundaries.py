"""Watch the boundaries of modules, and feed other values or gradients in at some of them.

A *boundary* is one floating tensor that enters or leaves one call of one module. Its key is
`module|in|path`, `module|out|path`; a second call's ends in `#2`. Values flow forward through
boundaries in the order in which they were met, gradients in the opposite one. Design:
docs/design.md 3.11.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from spmd_verify.dtensor_layouts import is_distributed
from spmd_verify.record import ROOT
from spmd_verify.reference.observe import is_in_backward

IN: Final = "in"
OUT: Final = "out"


class Boundaries:
    """Context around one training step.

    Attributes:
        values: What reached each boundary in forward, before anything was fed in: copies with
            the local shape and dtype, in forward order.
        gradients: What reached it in backward, likewise; only where autograd follows it. The
            gradient at an input is what this module alone passes on.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        fed_values: Mapping[str, Tensor] | None = None,
        fed_gradients: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Remember what to watch; nothing is hooked before `__enter__`.

        Args:
            modules: `(name, module)`, "" for the root.
            fed_values: By key, what the rest of forward gets instead; local shape. Backward
                flows on as if nothing had been replaced.
            fed_gradients: By key, what the rest of backward gets instead; local shape.
        """
        self.modules = list(modules)
        self.fed_values = fed_values or {}
        self.fed_gradients = fed_gradients or {}
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._undo = ExitStack()

    def __enter__(self) -> Boundaries:
        with ExitStack() as undo:
            for name, module in self.modules:
                before = partial(self._on_entry, name or ROOT)
                after = partial(self._on_exit, name or ROOT)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                undo.callback(handle.remove)
                undo.callback(module.register_forward_hook(after).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _on_entry(
        self, name: str, _module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Look at what enters a module."""
        if is_in_backward():  # recomputation of a checkpointed part
            return None
        passed = partial(self._passed, name, IN)
        return _mapped(args, "", passed), _mapped(kwargs, "", passed)

    def _on_exit(self, name: str, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Look at what leaves a module."""
        return None if is_in_backward() else _mapped(output, "", partial(self._passed, name, OUT))

    def _passed(self, name: str, side: str, path: str, tensor: Tensor) -> Tensor:
        """Note a tensor at a boundary, and return what goes on from there."""
        if not tensor.is_floating_point() or is_distributed(tensor):
            return tensor
        place = f"{name}|{side}|{path}"
        self._counts[place] += 1
        key = place if self._counts[place] == 1 else f"{place}#{self._counts[place]}"
        self.values[key] = tensor.detach().clone()
        fed = self.fed_values.get(key)
        if fed is not None and fed.shape == tensor.shape:
            tensor = _Fed.apply(tensor, fed.to(tensor.dtype))
        elif side == IN and tensor.requires_grad:
            tensor = tensor.view_as(tensor)  # so that other users of it are told apart
        if tensor.requires_grad:
            tensor.register_hook(partial(self._on_gradient, key))
        return tensor

    def _on_gradient(self, key: str, gradient: Tensor) -> Tensor | None:
        """Note a gradient at a boundary, and return what goes on from there."""
        if is_distributed(gradient):
            return None
        self.gradients[key] = gradient.detach().clone()
        fed = self.fed_gradients.get(key)
        if fed is None or fed.shape != gradient.shape:
            return None
        return fed.to(gradient.dtype).clone()


class _Fed(torch.autograd.Function):
    """Another value in forward, the same gradient in backward."""

    @staticmethod
    def forward(_ctx: Any, _value: Tensor, fed: Tensor) -> Tensor:
        """Return what is fed in."""
        return fed.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> tuple[Any, None]:
        """Hand the gradient on."""
        return gradients[0], None


def _mapped(value: Any, path: str, function: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a value with its tensors replaced; containers other than Python's own stay."""
    if isinstance(value, Tensor):
        return function(path, value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, f"{path}[{i}]", function) for i, v in enumerate(value))
    if type(value) is dict:
        return {
            k: _mapped(v, f"{path}.{k}" if path else str(k), function) for k, v in value.items()
        }
    return value
