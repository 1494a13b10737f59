"""Run a step on one device with other gradients than its own backward makes.

What a step does with gradients once backward is over - scaling and clipping them, updating with
one optimizer or several - is its own code: only the gradients that it finds are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from spmd_verify.reference.trajectory import named_parameters, optimizers_of


class GradientsGiven:
    """Context around one step that replaces gradients as soon as autograd has finished them.

    A gradient that several backward calls add up is replaced after each, so that the last one
    leaves the given value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        gradients: Mapping[str, Tensor],
        *,
        at_update: bool = False,
    ) -> None:
        """Remember what to give.

        Args:
            model: On one device.
            optimizer: Its optimizer, or several.
            gradients: By parameter; parameters that are not in it get none.
            at_update: Replace them right before the update: for steps that give parameters
                their gradients themselves.
        """
        self._live = named_parameters(model)[0]
        self._optimizers = optimizers_of(optimizer)
        self._gradients = gradients
        self._at_update = at_update
        self._given: set[str] = set()
        self._has_updated = False
        self._is_late = False
        self._hooks = ExitStack()

    def __enter__(self) -> GradientsGiven:
        for name, parameter in self._live.items():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._finished(name))
                self._hooks.callback(handle.remove)
        for single in self._optimizers:
            self._hooks.callback(single.register_step_pre_hook(self._on_update).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def problem(self) -> str | None:
        """Return why the step was not run as asked; None where it was."""
        if self._is_late:
            return "the step runs backward after an update, whose gradients depend on it"
        missing = [name for name in self._gradients if name not in self._given]
        return f"one device computes no gradient of {missing[0]}" if missing else None

    def _finished(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that replaces a finished gradient."""

        def on_finished(parameter: Tensor) -> None:
            self._is_late |= self._has_updated
            if not self._at_update:
                self._give(name, parameter)

        return on_finished

    def _on_update(self, *_: Any) -> None:
        """Replace all gradients before the first update, where that is asked for."""
        if self._at_update and not self._has_updated:
            for name, parameter in self._live.items():
                self._give(name, parameter)
        self._has_updated = True

    def _give(self, name: str, parameter: Tensor) -> None:
        """Replace one gradient."""
        value = self._gradients.get(name)
        self._given.add(name)
        with torch.no_grad():
            parameter.grad = None if value is None else value.to(parameter.dtype, copy=True)
