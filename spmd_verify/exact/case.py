"""A case in exact mode: dyadic state and inputs, fresh in every step, and exact surrogates.

Made by `case.load_case` under the override `exact`. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.exact.draws import draw_inputs, draw_state, generator
from spmd_verify.exact.surrogates import Surrogates
from spmd_verify.noise.rounding import without_onednn

# A power of two that is not 1: a forgotten rate shows.
LEARNING_RATE: Final = 0.5


class ExactCase(LoadedCase):
    """A case whose steps are independent of each other.

    Attributes:
        first: The step this view of the case begins with; see `at`.
        draw: Which draw of state and inputs; see `ExactInfo.draws`.
        replaced: What surrogates stood in for, "operator at file:line", in order; shared by
            all views.
    """

    def __init__(self, *args: Any) -> None:
        """Keep the description; see `LoadedCase`."""
        super().__init__(*args)
        self.first = self.draw = 0
        self._is_exactly = False
        self.replaced: dict[str, None] = {}

    def at(self, step: int, draw: int = 0) -> ExactCase:
        """Return the case of one step alone; its step 0 is this case's step `step`."""
        view = copy.copy(self)
        view.first, view.draw, view.steps = self.first + step, draw, 1
        return view

    def build_model(self) -> nn.Module:
        """Build a model with the dyadic state of the first step."""
        model = super().build_model()
        draw_state(model, generator(self.seed, self.first, self.draw, 0))
        return model

    def inputs(self, step: int) -> Any:
        """Return the dyadic inputs of a step."""
        return self._drawn(super().inputs(self.first + step), step)

    def batch(self, step: int) -> Any:
        """Return the dyadic batch of a step."""
        return self._drawn(super().batch(self.first + step), step)

    def _drawn(self, batch: Any, step: int) -> Any:
        """Return a batch with the draws of a step; inputs come first, so both callers agree."""
        return draw_inputs(batch, generator(self.seed, self.first + step, self.draw, 1))

    def seed_step(self, step: int) -> None:
        """Seed every generator for one training step."""
        super().seed_step(self.first + step)

    def optimizer(self, model: nn.Module) -> Any:
        """Return SGD with a dyadic rate, whatever the case's own optimizer is."""
        return torch.optim.SGD(list(model.parameters()), lr=LEARNING_RATE)

    def factory_mode(self) -> AbstractContextManager[Any]:
        """Return the context of every step: the case's, with surrogates inside."""
        return self._exactly()

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Run without oneDNN, whose kernels fuse and transform sums.

        Once around a step that a style and the case both put it around: stand-ins of stand-ins
        are on other grids.
        """
        if self._is_exactly:
            yield
            return
        self._is_exactly = True
        try:
            with (
                without_onednn(),
                super().factory_mode(),
                Surrogates(self.replaced, self.settings.dtype),
            ):
                yield
        finally:
            self._is_exactly = False
