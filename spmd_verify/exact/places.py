"""Which line of the user's code an operator comes from, also in backward."""

from __future__ import annotations

import torch

from spmd_verify.reference.float64_mode import user_place


class Places:
    """Remembers the lines of one step's forward."""

    def __init__(self) -> None:
        """Know no line yet."""
        self._lines: dict[int, str] = {}

    def here(self) -> str:
        """Return `file:line` of the operator being dispatched, `backward of file:line` there."""
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            line = None if node is None else self._lines.get(node._sequence_nr())
            return "backward" if line is None else f"backward of {line}"
        found = user_place()
        if found != "backward" and torch.is_grad_enabled():
            # The node of this operator, if it has one, was made last.
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = found
        return "the update" if found == "backward" else found
