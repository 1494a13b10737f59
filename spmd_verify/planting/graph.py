"""List the collectives of a local graph, and rewrite one of them.

Works on the graph of every rank at once, before groups are bound: a collective names its mesh
axis, and `coordinate_<axis>` is this rank's index on it (docs/design.md 2.4).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, fx

from spmd_verify.errors import Unsupported
from spmd_verify.planting.faults import DRY_RUN, PAYLOAD_KINDS, Collective, Fault
from spmd_verify.planting.payload import kept_if, scaled, shifted
from spmd_verify.styles.base import mesh_coordinates
from spmd_verify.user_code import is_user_file

aten = torch.ops.aten

_OPERATORS: Final = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class GraphPlanting:
    """Transformation of a local graph."""

    def __init__(
        self, fault: Fault, axes: Mapping[str, int], parts: Mapping[str, int] | None = None
    ) -> None:
        """Remember what to plant; `DRY_RUN` and state faults leave the graph alone.

        Args:
            fault: What to plant.
            axes: The mesh as the graph sees it.
            parts: The axes that it joins to one, outer first.
        """
        self._fault = fault
        self._axes = axes
        self._parts = dict(parts or {})
        self._listed: list[Collective] = []
        # Of the dry run, by collective and tensor: bytes, rows, whether it rounds.
        self._payloads: dict[int, dict[int, tuple[int, int, bool]]] = {}

    def __call__(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return the graph with the fault.

        Raises:
            Unsupported: `fault-not-planted`, where the graph has no such collective.
        """
        found = dict(self._found(graph))
        self._listed = list(found.values())
        self._payloads.clear()
        if self._fault.kind == DRY_RUN:
            for position, node in enumerate(found):
                _resend(graph.graph, node, partial(self._noting, graph.graph, position))
            graph.recompile()
        if self._fault.kind not in PAYLOAD_KINDS:
            return graph
        for node, collective in found.items():
            if collective.key == self._fault.key:
                self._plant(graph, node, collective)
                graph.recompile()
                return graph
        raise Unsupported(
            f"The fault cannot be planted: {self._fault.describe()} is not in the graph",
            slug="fault-not-planted",
        )

    @property
    def collectives(self) -> list[Collective]:
        """Return those of the graph last given, with what the dry run saw them send."""
        found = []
        for position, collective in enumerate(self._listed):
            sent = self._payloads.get(position, {}).values()
            found.append(
                collective
                if not sent
                else msgspec.structs.replace(
                    collective,
                    payload_bytes=sum(size for size, _, _ in sent),
                    rows=max(rows for _, rows, _ in sent),
                    is_floating=any(is_floating for _, _, is_floating in sent),
                )
            )
        return found

    def _noting(self, graph: fx.Graph, position: int, index: int, source: fx.Node) -> fx.Node:
        """Make the node that looks at what is sent; a local graph knows no sizes."""
        payloads = self._payloads

        def noted(payload: Tensor, position: int, index: int) -> Tensor:
            is_floating = payload.is_floating_point() or payload.is_complex()
            rows = payload.shape[0] if payload.ndim else 1
            payloads.setdefault(position, {})[index] = (payload.nbytes, rows, is_floating)
            return payload

        return graph.call_function(noted, (source, position, index))

    def _found(self, graph: fx.GraphModule) -> Iterator[tuple[fx.Node, Collective]]:
        """Give the collectives that belong to the step in order."""
        counts: Counter[tuple[str, str]] = Counter()
        for node in graph.graph.nodes:
            name = _operator_name(node)
            if name not in _OPERATORS or _is_only_observed(node):
                continue
            kind, axis = _OPERATORS[name], str(node.args[-1])
            yield (
                node,
                Collective(
                    operator=kind,
                    axis=axis,
                    nth=counts[kind, axis],
                    size=self._parts[axis] if axis in self._parts else self._axes[axis],
                    reduction=str(node.args[1]) if kind in ("all_reduce", "reduce_scatter") else "",
                    line=_user_line(node),
                    ranks=list(range(len(mesh_coordinates(self._axes)))),
                ),
            )
            counts[kind, axis] += 1

    def _plant(self, graph: fx.GraphModule, node: fx.Node, collective: Collective) -> None:
        """Rewrite one collective, in place."""
        if self._fault.kind == "drop":
            self._drop(graph.graph, node, collective)
        elif self._fault.kind == "wrong_group":
            node.args = (*node.args[:-1], self._fault.group)
        else:
            with graph.graph.inserting_before(node):
                change = self._change(graph.graph)
            _resend(graph.graph, node, lambda _, source: change(source))

    def _change(self, graph: fx.Graph) -> Callable[[fx.Node], fx.Node]:
        """Return what makes the node that is sent instead."""
        if self._fault.kind == "shift":
            return lambda source: graph.call_function(shifted, (source,))
        if self._fault.kind == "zero_rank":
            is_elsewhere = self._is_elsewhere(graph)
            return lambda source: graph.call_function(kept_if, (source, is_elsewhere))
        return lambda source: graph.call_function(scaled, (source, self._fault.factor))

    def _is_elsewhere(self, graph: fx.Graph) -> fx.Node:
        """Make the condition that is false on the fault's rank and true on all others."""
        coordinate = mesh_coordinates(self._axes)[self._fault.rank]
        found: fx.Node | None = None
        for name, index in zip(self._axes, coordinate, strict=True):
            own = graph.create_node("get_attr", f"coordinate_{name}")
            differs = graph.call_function(operator.ne, (own, index))
            found = (
                differs if found is None else graph.call_function(operator.or_, (found, differs))
            )
        assert found is not None, "a mesh has an axis"
        return found

    def _drop(self, graph: fx.Graph, node: fx.Node, collective: Collective) -> None:
        """Let what waits for the collective read this rank's own share."""
        sources = _sources(node)
        for wait, index in list(_waits(node)):
            with graph.inserting_before(wait):
                own = self._own_share(graph, sources[index], collective)
            wait.replace_all_uses_with(_like(own, wait))

    def _own_share(self, graph: fx.Graph, source: fx.Node, collective: Collective) -> fx.Node:
        """Make this rank's share of what the collective would have returned."""
        size = collective.size
        if collective.operator == "all_gather":
            return graph.call_function(aten.cat.default, ([source] * size,))
        if collective.operator == "reduce_scatter":
            own = self._coordinate(graph, collective.axis)
            parts = graph.call_function(aten.chunk.default, (source, size))
            part = graph.call_function(operator.getitem, (parts, own))
            return graph.call_function(aten.clone.default, (part,))
        return graph.call_function(aten.clone.default, (source,))

    def _coordinate(self, graph: fx.Graph, axis: str) -> fx.Node:
        """Make this rank's index on an axis, or on a part of the only one."""
        if axis in self._axes:
            return graph.create_node("get_attr", f"coordinate_{axis}")
        (joined,) = self._axes
        inner = list(self._parts)[list(self._parts).index(axis) + 1 :]
        own = graph.create_node("get_attr", f"coordinate_{joined}")
        block = graph.call_function(
            operator.floordiv, (own, math.prod(self._parts[each] for each in inner))
        )
        return graph.call_function(operator.mod, (block, self._parts[axis]))


def _resend(graph: fx.Graph, node: fx.Node, change: Callable[[int, fx.Node], fx.Node]) -> None:
    """Let a collective send what `change(index, source)` makes of each tensor it sends."""
    with graph.inserting_before(node):
        made = [_like(change(i, source), source) for i, source in enumerate(_sources(node))]
    is_list = isinstance(node.args[0], (list, tuple))
    node.args = (made if is_list else made[0], *node.args[1:])


def _operator_name(node: fx.Node) -> str:
    """Return the functional collective of a node, empty for anything else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return ""
    return target._schema.name.rpartition("::")[2]


def _user_line(node: fx.Node) -> str:
    """Return the user's `file:line` of a node, empty where it is none of theirs."""
    line = str(node.meta.get("line") or "")
    return line if line and is_user_file(line.rpartition(":")[0]) else ""


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes a collective sends."""
    first: Any = node.args[0]
    return list(first) if isinstance(first, (list, tuple)) else [first]


def _waits(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Give what waits for a collective, with the index of the tensor it waits for."""
    for user in node.users:
        if user.target is operator.getitem:
            index: Any = user.args[1]
            yield from ((wait, index) for wait in user.users)
        else:
            yield user, 0


def _is_only_observed(node: fx.Node) -> bool:
    """Say whether only what the step returns reads a collective: it is there to be compared."""
    readers = {reader.op for wait, _ in _waits(node) for reader in wait.users}
    return readers <= {"output"}


def _like(made: fx.Node, source: fx.Node) -> fx.Node:
    """Give a node the description of the one it stands in for."""
    made.meta = dict(source.meta)
    return made
