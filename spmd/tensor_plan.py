"""Which weights a tensor-parallel mode splits, and along which dim: read off the captured graph.

A weight is what a matrix product or a lookup in forward multiplies or reads, seen through views
and casts. *Column* splits what the product makes, *row* what it sums over, *vocabulary* the rows
of a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from spmd.eligible import region_of
from spmd.program import signature_of

aten = torch.ops.aten

COLUMN, ROW, VOCABULARY = "column", "row", "vocabulary"

# Product -> (position of the bias or None, of the left factor, of the right one).
_PRODUCTS: dict[Any, tuple[int | None, int, int]] = {
    aten.mm.default: (None, 0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.bmm.default: (None, 0, 1),
    aten.baddbmm.default: (0, 1, 2),
}
_SAME = {
    aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten.expand.default,
}  # fmt: skip
# What a split of the features passes through on the way from a column to a row.
_THROUGH = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default,
    aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.select.int, aten.unbind.int, aten.cat.default, aten.clone.default,
    aten._to_copy.default, aten.bmm.default, aten._softmax.default,
    aten._safe_softmax.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """How a parameter is used.

    Attributes:
        kind: What the derived plan makes of it.
        column: Dim of the parameter that the product makes; of a lookup, its rows.
        row: Dim that the product sums over; of a lookup, its columns.
        bias: Parameter added to the product, if it is one.
    """

    kind: str
    column: int
    row: int
    bias: str | None = None


def weights_of(graph: fx.GraphModule) -> dict[str, Weight]:
    """Return {parameter: how it is used} of a captured step.

    Columns and rows alternate: a product of what a column made, by element-wise operators, views
    and attention only, is a row. A weight that is used several times is what its first use
    makes of it, but one that is looked up is a vocabulary.
    """
    return _Reading(graph).run()


def products_of(graph: fx.GraphModule) -> list[fx.Node]:
    """Return what parameters multiply in forward, in order: the other factors."""
    reading = _Reading(graph)
    reading.run()
    return reading.factors


def readers_of(graph: fx.GraphModule) -> dict[str, str]:
    """Return {parameter: the first operator of forward that reads it or a view of it}."""
    reading = _Reading(graph)
    found: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or region_of(node) != "forward":
            continue
        if reading._origin(node) is not None:
            continue  # a view or a cast: what reads that one is asked for
        for factor in node.all_input_nodes:
            source = reading._origin(factor)
            if source is not None:
                found.setdefault(source[0], str(getattr(node.target, "__name__", node.target)))
    return found


class _Reading:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        signature = signature_of(graph)
        placeholders = graph.graph.find_nodes(op="placeholder")
        self.parameters = {placeholders[i]: s.name for i, s in signature.of_kind("parameter")}
        self.found: dict[str, Weight] = {}
        self.is_split: set[fx.Node] = set()
        self.factors: list[fx.Node] = []

    def run(self) -> dict[str, Weight]:
        for node in self.graph.graph.nodes:
            if node.op != "call_function" or region_of(node) != "forward":
                continue
            if node.target is aten.embedding.default:
                self._lookup(node)
            elif node.target in _PRODUCTS and self._product(node):
                continue
            elif self._goes_through(node) and self.is_split & set(node.all_input_nodes):
                self.is_split.add(node)
        return self.found

    def _lookup(self, node: fx.Node) -> None:
        source = self._origin(node.args[0])
        if source is not None and source[1] == (0, 1):
            self.found[source[0]] = Weight(VOCABULARY, 0, 1)

    def _product(self, node: fx.Node) -> bool:
        """Note the weight of a product; whether it has one."""
        bias, left, right = _PRODUCTS[node.target]
        for at, other, column, row in ((right, left, -1, -2), (left, right, -2, -1)):
            weight: Any = node.args[at]
            x: Any = node.args[other]
            source = self._origin(weight)
            if source is None:
                continue
            self.factors.append(x)
            name, dims = source
            known = self.found.get(name)
            kind = known.kind if known is not None else ROW if x in self.is_split else COLUMN
            if known is None:
                added = None if bias is None else self._origin(node.args[bias])
                self.found[name] = Weight(
                    kind, dims[column], dims[row], None if added is None else added[0]
                )
            if kind == COLUMN:
                self.is_split.add(node)
            return True
        return False

    def _goes_through(self, node: fx.Node) -> bool:
        tags = getattr(node.target, "tags", ())
        is_item = not isinstance(node.target, torch._ops.OpOverload)
        return is_item or node.target in _THROUGH or torch.Tag.pointwise in tags

    def _origin(self, node: Any) -> tuple[str, tuple[int, ...]] | None:
        """Return the parameter a node is a view of, and its dim for each of the node's dims."""
        if node in self.parameters:
            return self.parameters[node], tuple(range(node.meta["val"].dim()))
        if not isinstance(node, fx.Node) or node.op != "call_function" or not node.args:
            return None
        first: Any = node.args[0]
        value = node.meta.get("val")
        if not isinstance(first, fx.Node) or not isinstance(value, Tensor):
            return None
        source = self._origin(first)
        if source is None:
            return None
        name, dims = source
        if node.target in _SAME or value.shape == first.meta["val"].shape:
            if node.target in (aten.t.default, aten.transpose.int, aten.permute.default):
                return name, _permuted(node, dims)
            is_view = node.target in _SAME or node.target in _THROUGH
            return (name, dims) if is_view and value.dim() == len(dims) else None
        if node.target in (aten.t.default, aten.transpose.int, aten.permute.default):
            return name, _permuted(node, dims)
        return None


def _permuted(node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return tuple(dims[d] for d in order)
    a, b = (0, 1) if node.target is aten.t.default else node.args[1:3]
    moved = list(dims)
    moved[a], moved[b] = moved[b], moved[a]  # type: ignore[index]
    return tuple(moved)
