"""Replace or hide submodules before the step is captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from spmd.errors import UsageError


class Override(ABC):
    """Replaces submodules and rewrites the local graph that came of it."""

    @abstractmethod
    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        """Return the module to use for `fqn`; the original one to leave it alone.

        Args:
            fqn: Dotted name; the root is never offered.
            orig_submodule: The module there now.
        """

    @abstractmethod
    def transform(self, gm: fx.GraphModule, flat_state: list[Any]) -> fx.GraphModule:
        """Return the local graph after this override's own rewrite.

        Args:
            gm: Local graph after the mode's passes.
            flat_state: The lifted values, in the order of the first placeholders.
        """


def apply_overrides(model: nn.Module, overrides: Sequence[Override], prefix: str = "") -> None:
    """Offer every submodule once to each override, in order; recurse into those kept."""
    for name, child in list(model.named_children()):
        fqn = f"{prefix}{name}"
        chosen = child
        for override in overrides:
            chosen = override.replacement(fqn, chosen)
            if not isinstance(chosen, nn.Module):
                raise UsageError(
                    f"{type(override).__name__}.replacement({fqn!r}, ...) returned "
                    f"{type(chosen).__name__}, expected a module. Return orig_submodule to leave "
                    "it alone.",
                    "override-result",
                )
        if chosen is not child:
            setattr(model, name, chosen)
        else:
            apply_overrides(child, overrides, f"{fqn}.")
