"""Find the first operator of a local graph that does not compute what the global one does.

Every local node remembers its global node and its layout. The local graph is run node by
node; each value is compared with its part of the global graph's value and then replaced
by it, so a difference is one operator's own and nothing is blamed for what it was fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from spmd.layout import Layout
from spmd.ranks import part_of

# An operator's own rounding stays well below this many units of it relative to the norm
# of its result; a relative fault of 1e-4 in float32 is 830 units. Measured over the
# layers of the examples in lock-step at 4 ranks: 12 units at most.
_UNITS = 64.0


@dataclass(frozen=True)
class Divergence:
    """One operator that computes something else.

    Attributes:
        node: Name of the global node.
        operator: The operator's name.
        line: "file:line" of the user's code it came from, if known.
        region: `forward`, `backward` or `optimizer`.
        error: Norm of the difference, of all parts seen here.
        scale: Norm of the global value.
    """

    node: str
    operator: str
    line: str | None
    region: str
    error: float
    scale: float


def global_values(graph: fx.GraphModule, inputs: list[Any]) -> dict[str, Any]:
    """Run the global graph on one device and return every node's value, by name.

    Args:
        graph: A program's global graph.
        inputs: Global values, one per placeholder.
    """
    values: dict[str, Any] = {}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            _keep(values, n.name, value)
            return value

    with torch.no_grad():
        Keep(graph, garbage_collect_values=False).run(*inputs)
    return values


def _keep(values: dict[str, Any], name: str, value: Any) -> None:
    values[name] = value
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _keep(values, f"{name}#{position}", item)


class Localizer:
    """Compares local values with the global ones; give `visit` to a walk over the graph.

    Args:
        program_graph: The global graph, for the operators' names.
        values: From `global_values`.
        coordinates: Of the ranks whose local values will be seen.
    """

    def __init__(
        self,
        program_graph: fx.GraphModule,
        values: dict[str, Any],
        coordinates: list[tuple[int, ...]],
    ) -> None:
        self.found: Divergence | None = None
        self._values, self._coordinates = values, coordinates
        self._nodes = {node.name: node for node in program_graph.graph.nodes}

    def visit(self, node: fx.Node, locals_: list[Any]) -> list[Any]:
        """Return the values the walk goes on with: the global value's parts.

        Args:
            node: Local node.
            locals_: Its value on each rank.
        """
        layout, name = node.meta.get("layout"), node.meta.get("global")
        expected = self._values.get(name) if name is not None else None
        if not isinstance(layout, Layout) or layout.has_partial or not isinstance(expected, Tensor):
            return locals_
        if node.op == "placeholder" or not all(isinstance(x, Tensor) for x in locals_):
            return locals_
        parts = [part_of(expected, layout, c) for c in self._coordinates]
        if any(p.shape != x.shape for p, x in zip(parts, locals_, strict=True)):
            return locals_
        if self.found is None:
            self._compare(str(name), locals_, parts, expected)
        return [p.clone() for p in parts]

    def _compare(self, name: str, actual: list[Tensor], parts: list[Tensor], whole: Tensor) -> None:
        node = self._nodes[name.partition("#")[0]]
        if "empty" in str(node.target):
            return
        squares = sum(_squares(x, part) for x, part in zip(actual, parts, strict=True))
        scale = self._scale(node, whole)
        unit = torch.finfo(whole.dtype).eps / 2 if whole.is_floating_point() else 0.0
        if squares**0.5 > _UNITS * unit * scale:
            custom = node.meta.get("custom", {})
            self.found = Divergence(
                name, str(node.target), custom.get("line"), custom.get("region", "forward"),
                squares**0.5, scale,
            )  # fmt: skip

    def _scale(self, node: fx.Node, whole: Tensor) -> float:
        """Return how large what was added up can be: results may cancel, operands do not."""
        # A partial sum may have come through views: what was added up lies behind them.
        while len(node.all_input_nodes) == 1 and node.target in _VIEWS:
            node = node.all_input_nodes[0]
        norms = sorted(
            _norm(self._values[n.name])
            for n in node.all_input_nodes
            if isinstance(self._values.get(n.name), Tensor)
        )
        product = norms[-1] * norms[-2] if len(norms) > 1 and _multiplies(node) else 0.0
        return max([_norm(whole), product, *norms])


aten = torch.ops.aten
_VIEWS = {
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
}  # fmt: skip


def _multiplies(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in ("mm", "conv", "attention", "linear"))


def _norm(x: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0
    return float(x.double()[x.isfinite()].norm())


def _squares(actual: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return float((actual != expected).sum())
    difference = actual.double() - expected.double()
    return float(difference[expected.isfinite()].square().sum())


Visit = Callable[[fx.Node, list[Any]], list[Any]]


def walk_rank(graph: fx.GraphModule, inputs: list[Any], visit: Visit) -> None:
    """Run a local graph on this rank, every value passed through `visit`."""

    class Walk(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            return value if n.op == "output" else visit(n, [value])[0]

    with torch.no_grad():
        Walk(graph).run(*inputs)
