"""What an eager style has to say: how a model is changed, stepped and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase


class Recipe(Protocol):
    """How one eager style changes a model.

    Attributes:
        name: Its id.
        is_per_rank: Its published definition is per rank: what differs because of that is
            `semantic`, not `mismatch`.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - above

    @property
    def is_per_rank(self) -> bool: ...  # noqa: D102 - above

    def apply(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the parallel model, and its optimizer where the style builds its own."""
        ...

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run one training step on this rank's part of the batch; return its loss."""
        ...

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Run one eval forward on this rank's part; None where the style has none."""
        ...

    def layout(self, case: LoadedCase, name: str, axes: Mapping[str, int]) -> Any:
        """Return the declared layout of a plain parameter, None where none is declared."""
        ...

    @property
    def has_gather(self) -> bool:
        """Say whether the style puts plain tensors together itself."""
        ...

    @property
    def has_policy(self) -> bool:
        """Say whether the style casts parameters and gradients as the case's variants ask."""
        ...

    def gather(self, case: LoadedCase, name: str, parts: list[Tensor]) -> Tensor | None:
        """Return the global tensor of what the ranks hold, in rank order; None if it does not."""
        ...

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse a batch dim that the style cannot split over an axis.

        Raises:
            Unsupported: Naming input, sizes and what would work.
        """
        ...
