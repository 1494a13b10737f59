"""The contract of a parallel mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.optim import Optimizer

from spmd.passes import Pass, run_passes
from spmd.planning import batch_dims
from spmd.program import Signature


class ParallelMode(ABC):
    """Partitions a captured step for a mesh and optimises the result.

    Attributes:
        mesh: A `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks.
        gradient_reduction: `mean` if every rank captures the step of its own part.
        rng: `local` if every rank draws its own random numbers.
        strict: Whether to refuse operators without a rule; set by `compile`.
    """

    mesh: Any = None
    gradient_reduction: str = "global"
    rng: str = "global"
    strict: bool = False

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

    def argument_splits(
        self, signature: Signature, shapes: list[tuple[int, ...]], num_axes: int
    ) -> dict[str, tuple[int | None, ...]]:
        """Return which dim of each argument each mesh axis splits, under `batch="local"`.

        By default the batch dim is split over the first axis; `input_batch_dim` of the mode
        names it, 0 where there is none.

        Args:
            signature: Names of the step's inputs.
            shapes: One per input; sizes of arguments may be any values that can be compared.
            num_axes: Axes of the mesh.
        """
        dims = batch_dims(signature, shapes, getattr(self, "input_batch_dim", 0))
        return {name: (dim, *(None,) * (num_axes - 1)) for name, dim in dims.items()}


class PassPipelineMode(ParallelMode):
    """A mode whose second half is an ordered tuple of passes."""

    def __init__(self, default_passes: Sequence[Pass], custom_passes: Any) -> None:
        if isinstance(custom_passes, Pass):
            custom_passes = (custom_passes,)
        self.passes: Any = tuple(default_passes) if custom_passes is None else custom_passes

    def transform_and_compile(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the local graph after the passes; `custom_passes` replace the default ones."""
        return run_passes(gm, self.passes)
