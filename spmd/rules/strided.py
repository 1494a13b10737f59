"""as_strided: reads memory, so the operand is laid out as the capture saw it first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spmd import runtime
from spmd.errors import LayoutError
from spmd.layout import Shard
from spmd.rules.base import Call, Candidate, Rule, rule

aten = torch.ops.aten


def _reach(size: Any, stride: Any) -> int:
    """Return how far the last element lies behind the first, in elements; -1 if there is none."""
    if 0 in size:
        return -1
    return sum((n - 1) * step for n, step in zip(size, stride, strict=True))


class Strided(Rule):
    """Whole, or split on dim 0 where every row is read from its own memory only."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield the split of dim 0 if rows do not overlap."""
        if call.target != aten.as_strided.default or not self._rows_are_apart(call):
            return
        for placement in placements[0]:
            if isinstance(placement, Shard) and placement.dim == 0 and placement.outer == 1:
                yield Candidate((placement,), (placement,))

    def _rows_are_apart(self, call: Call) -> bool:
        x, (size, stride, offset) = call.operands[0], _geometry(call)
        if not x.is_contiguous() or offset or not size or x.dim() == 0:
            return False
        same_rows = size[0] == x.shape[0] and stride[0] == x.stride(0)
        return same_rows and _reach(size[1:], stride[1:]) < stride[0]

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Emit the read (or write) on a copy with the traced strides.

        Raises:
            LayoutError: `as-strided`, if it reaches memory that is not the operand's.
        """
        x, (size, stride, offset) = call.operands[0], _geometry(call)
        if offset < 0 or offset + _reach(size, stride) > _reach(x.shape, x.stride()):
            raise LayoutError(
                f"{call.target} reads elements {offset} to {offset + _reach(size, stride)} of a "
                f"tensor of shape {list(x.shape)} and strides {list(x.stride())}: memory that is "
                "not the tensor's has no place on the mesh. Use slices or unfold.",
                "as-strided",
            )
        shape = emitter.sizes(tuple(x.shape), emitter.inputs[0])
        if call.target == aten.as_strided.default:
            local = emitter.sizes(tuple(size), layouts[0])
            geometry = (local, list(stride), offset)
            return emitter.call(
                runtime.read_strided, (args[0], shape, list(x.stride()), *geometry), {}
            )
        geometry = (list(size), list(stride), offset)
        return emitter.call(
            runtime.write_strided, (args[0], args[1], shape, list(x.stride()), *geometry), {}
        )


def _geometry(call: Call) -> tuple[Any, Any, int]:
    offset = call.argument("storage_offset")
    own = call.operands[0].storage_offset()
    start = 0 if offset is None else offset - own
    return call.argument("size"), call.argument("stride"), start


@rule(aten.as_strided.default, aten.as_strided_scatter.default)
def _strided(call: Call) -> Rule | None:
    return Strided() if isinstance(call.outputs[0], Tensor) else None
