"""Random numbers as pipeline stages draw them: every stage has a generator of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from spmd_verify.seeding import RandomState


class StageStreams:
    """Context in which the stages of a whole model draw as ranks with a stage each would.

    All start from the state on entry. A stage begins where the forward of its first module
    does; the next micro-batch's forward is the first stage's again.
    """

    def __init__(self, model: nn.Module, firsts: Sequence[str]) -> None:
        """Remember where stages begin.

        Args:
            model: The whole model.
            firsts: Path of the first module of every stage.
        """
        self.model = model
        self.firsts = firsts
        self._hooks = ExitStack()

    def __enter__(self) -> StageStreams:
        self._states = [RandomState.now()] * len(self.firsts)
        self._stage = 0
        modules = [self.model, *(self.model.get_submodule(path) for path in self.firsts[1:])]
        for at, module in enumerate(modules):
            self._hooks.callback(module.register_forward_pre_hook(self._entering(at)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _entering(self, stage: int) -> Callable[[nn.Module, Any], None]:
        """Return a hook that goes on with a stage's generator."""

        def on_entry(_module: nn.Module, _args: Any) -> None:
            self._states[self._stage] = RandomState.now()
            self._stage = stage
            self._states[stage].restore()

        return on_entry
