"""A case under `--adversarial`: its batches and its model as `Changes` says.

The override `inputs=adversarial` has the changes found by trying, `inputs=adversarial:...`
brings them: the controller lets one process find them and hands them to all others.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Final

from torch import nn

from spmd_verify.adversarial.changes import Changes, change_model, changed_batch, decided
from spmd_verify.adversarial.search import found
from spmd_verify.cases.address import Address
from spmd_verify.cases.case import CaseSettings, LoadedCase
from spmd_verify.cases.hooks import Case

# Optimizer state has a past in the second step, and the third shows what grows.
FEWEST_STEPS: Final = 3


class AdversarialCase(LoadedCase):
    """One case whose inputs and initial values hide as little as they can.

    The changes are found when they are first needed; what is tried then runs on copies.
    """

    def __init__(
        self, address: Address, hooks: Case, settings: CaseSettings, source_hash: str
    ) -> None:
        """Keep the description, with at least three steps."""
        super().__init__(address, hooks, settings, source_hash)
        self.steps = max(settings.steps, FEWEST_STEPS)
        self._changes = decided(self.overrides["inputs"])

    @property
    def changes(self) -> Changes:
        """Return what is changed; while it is searched for, nothing."""
        if self._changes is None:
            self._changes = Changes()
            self._changes = found(self)
            self.overrides.update(self._changes.overrides())
        return self._changes

    def under(self, changes: Changes) -> AdversarialCase:
        """Return the case with other changes."""
        other = copy.copy(self)
        other._changes = changes
        return other

    def build_model(self) -> nn.Module:
        """Build the model and move what starts at a constant."""
        changes = self.changes
        model = super().build_model()
        change_model(model, changes)
        return model

    def batch(self, step: int) -> Any:
        """Return a copy of the changed batch of a step."""
        changes = self.changes
        if "rows" in self.overrides:  # an experiment has a size of its own
            changes = replace(changes, size=0)
        return changed_batch(self, super().batch(step), step, changes)
