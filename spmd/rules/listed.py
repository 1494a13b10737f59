"""Operators on lists of tensors (foreach and fused optimizers): each position on its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from spmd.layout import REPLICATE, Partial, Placement, Shard
from spmd.rules.base import Call, Candidate, Rule, general_rule


class Listed(Rule):
    """Position i of every list operand is element-wise with position i of the outputs.

    Tensors outside lists (a learning rate) are whole.
    """

    def __init__(self, lists: list[list[int]], outputs: list[list[int]]) -> None:
        self.lists, self.outputs = lists, outputs

    def candidates(
        self, call: Call, placements: Sequence[Sequence[Placement]], num_ranks: int
    ) -> Iterable[Candidate]:
        """Yield one candidate: every position in the placement its operands mostly have."""
        inputs: list[Placement] = [REPLICATE] * len(placements)
        outputs: list[Placement] = [REPLICATE] * len(call.outputs)
        for operands, results in zip(self.lists, self.outputs, strict=True):
            shape = max((call.operands[i].shape for i in operands), key=len)
            sharded = [
                p for i in operands for p in placements[i]
                if isinstance(p, Shard) and call.operands[i].shape == shape
            ]  # fmt: skip
            if not sharded or any(
                isinstance(p, Partial) for i in operands for p in placements[i][:1]
            ):
                continue
            for i in operands:
                if call.operands[i].shape == shape:
                    inputs[i] = sharded[0]
            for i in results:
                if call.outputs[i] is not None and call.outputs[i].shape == shape:
                    outputs[i] = sharded[0]
        yield Candidate(tuple(inputs), tuple(outputs))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Run the operator: positions may be empty one by one."""
        return emitter.call(call.target, args, kwargs)


def _positions(call: Call) -> Listed | None:
    """Match operands by their position within their lists."""
    lists: dict[int, list[int]] = {}
    operand = 0
    for argument in (*call.node.args, *call.node.kwargs.values()):
        if isinstance(argument, (list, tuple)):
            for position, leaf in enumerate(argument):
                if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
                    lists.setdefault(position, []).append(operand)
                    operand += 1
        elif isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            operand += 1
    if not lists:
        return None
    return Listed([lists[i] for i in sorted(lists)], [[i] for i in sorted(lists)])


@general_rule(lambda target: target._schema.name.startswith("aten::_foreach_"))
def _foreach(call: Call) -> Rule | None:
    listed = _positions(call)
    return listed if listed and len(call.outputs) == len(listed.lists) else None
