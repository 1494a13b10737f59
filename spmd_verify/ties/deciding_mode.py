"""A dispatch mode that hands every decision of a step to whoever chooses for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.ties.deciding import Choice, call_of


class DecidingMode(TorchDispatchMode):
    """Runs deciding operators on what `choose` gives for their rows; see `deciding.Call`.

    Enter it last: modes that were entered before see the operators it runs. Private
    `torch.utils._python_dispatch`: the only way to see what backward computes.
    """

    def __init__(self, choose: Choice) -> None:
        """Remember who chooses."""
        super().__init__()
        self._choose = choose

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch first; what that calls is seen here
        named = kwargs or {}
        call = call_of(func, args, named)
        return func(*args, **named) if call is None else call.decide(self._choose)
