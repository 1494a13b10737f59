"""The contract of a parallel mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer

from spmd.passes import Pass, run_passes


class ParallelMode(ABC):
    """Partitions a captured step for a mesh and optimises the result.

    Attributes:
        mesh: A `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks.
    """

    mesh: Any = None
    gradient_reduction: str = "global"
    rng: str = "global"

    @abstractmethod
    def partition(
        self,
        gm: fx.GraphModule,
        model: nn.Module,
        optimizer: Optimizer | None,
        params_and_buffers: dict[str, Any],
        named_states: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> fx.GraphModule:
        """Return the local graph of `gm`, with the same signature.

        Args:
            gm: Functional global graph; `gm.meta["signature"]` names its inputs and outputs.
            model: The captured module; not to be changed.
            optimizer: The captured optimizer, or None; not to be changed.
            params_and_buffers: Name -> global value (fake).
            named_states: Parameter name -> its optimizer state (fake).
            args: Positional arguments of the step.
            kwargs: Keyword arguments of the step.

        Returns:
            A graph whose `meta["layouts"]` has one layout per placeholder (`inputs`) and
            per output (`outputs`).
        """

    @abstractmethod
    def transform_and_compile(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the local graph after the mode's passes."""


class PassPipelineMode(ParallelMode):
    """A mode whose second half is an ordered tuple of passes."""

    def __init__(self, default_passes: Sequence[Pass], custom_passes: Any) -> None:
        self.passes: Any = tuple(default_passes) if custom_passes is None else custom_passes

    def transform_and_compile(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the local graph after the passes; `custom_passes` replace the default ones."""
        return run_passes(gm, self.passes)
