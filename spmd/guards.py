"""Values the capture has to know: lazily computed, and guarded in the graph.

Capture runs on fake tensors. Where the step needs a number out of a tensor - a size, a
branch inside an optimizer - the traced prefix is run once on the real inputs, the number
is used, and a node is put into the graph that checks it at every call.

`ShapeEnv.evaluate_expr` is private torch API; overriding it is the one place where a
guard on an unbacked symbol can be answered (checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from spmd import ops
from spmd.errors import CaptureError
from spmd.source_lines import refuse_user_control_flow, user_line


class ValuedShapeEnv(ShapeEnv):  # pyright: ignore
    """A shape environment that asks `on_guard` for the value of unbacked expressions."""

    on_guard: Callable[[sympy.Basic], Any] | None = None

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        """Return the value of `orig_expr`, from real data where the symbols have none."""
        symbols = getattr(orig_expr, "free_symbols", set())
        if self.on_guard is not None and symbols and not symbols <= self.backed_var_to_val.keys():
            return self.on_guard(orig_expr)
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def end_questions(self) -> None:
        """Forget who answers: the answers read the model, and torch keeps a few fake tensors.

        What it keeps them in is not seen by the garbage collector; they lead here by their mode.
        """
        self.on_guard = None


class Shadow:
    """Runs the traced prefix on real values, as far as asked and never twice.

    Args:
        graph: The tracer's growing graph; in-place operators are run as they stand.
        root: Owner of its `get_attr` constants.
        fetch: Placeholder position -> real value (a private copy).
    """

    def __init__(self, graph: fx.Graph, root: Any, fetch: Callable[[int], Any]) -> None:
        self._graph, self._root, self._fetch = graph, root, fetch
        self._full = _Prefix(lambda _: True)
        self._small = _Prefix(lambda value: not isinstance(value, Tensor) or value.numel() <= 1)

    def value(self, node: fx.Node) -> Any:
        """Return the real value of `node`, which is in the graph.

        The cheap attempt runs only what depends on one-element inputs (step counts,
        hyper-parameters); the whole prefix is run when that does not reach the node.
        """
        for prefix in (self._small, self._full):
            prefix.advance(self._graph, self._root, self._fetch, node)
            if prefix.known(node):
                return prefix.values[node]
        raise RuntimeError(f"node {node} has no real value")


class _Prefix:
    def __init__(self, accepts: Callable[[Any], bool]) -> None:
        self._accepts = accepts
        self._next: fx.Node | None = None
        self._placeholders = 0
        self._poisoned: set[fx.Node] = set()
        self._generator = torch.default_generator.get_state()
        self._generators: dict[torch.Generator, torch.Generator] = {}
        self.values: dict[fx.Node, Any] = {}

    def known(self, node: fx.Node) -> bool:
        return node in self.values and node not in self._poisoned

    def advance(self, graph: fx.Graph, root: Any, fetch: Any, target: fx.Node) -> None:
        if target in self.values or target in self._poisoned:
            return
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.utils._python_dispatch import _disable_current_modes

        before = torch.default_generator.get_state()
        try:
            with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
                torch.default_generator.set_state(self._generator)
                node = self._next.next if self._next is not None else next(iter(graph.nodes))
                while node.op != "root":
                    self._run(node, root, fetch)
                    self._next = node
                    if node is target:
                        break
                    node = node.next
                self._generator = torch.default_generator.get_state()
        finally:
            torch.default_generator.set_state(before)

    def _run(self, node: fx.Node, root: Any, fetch: Any) -> None:
        if node.op == "placeholder":
            if self._accepts(node.meta.get("val")):
                self.values[node] = fetch(self._placeholders)
            else:
                self._poisoned.add(node)
            self._placeholders += 1
        elif node.op == "get_attr":
            value = _attribute(root, str(node.target))
            self.values[node] = value.clone() if isinstance(value, Tensor) else value
        elif node.op == "call_function":
            inputs = node.all_input_nodes
            if any(not self.known(n) for n in inputs):
                self._poisoned.add(node)
                if _mutates(node.target):
                    self._poisoned.update(inputs)
                return
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._lookup)
            self.values[node] = node.target(*args, **kwargs)

    def _lookup(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):  # the user's own: drawn from a copy here
            return self._generators.setdefault(value, value.clone_state())
        return self.values[value] if isinstance(value, fx.Node) else value


def _mutates(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _attribute(root: Any, target: str) -> Any:
    for part in target.split("."):
        root = getattr(root, part)
    return root


class Guards:
    """Answers questions about symbols from real values, and guards each answer in the graph.

    Args:
        graph: The tracer's growing graph, which gets the `check_value` nodes.
        value: Node of the graph -> its real value.
        meta: Gives the `custom` meta of a guard: region and line.
    """

    def __init__(
        self, graph: fx.Graph, value: Callable[[fx.Node], Any], meta: Callable[[], dict[str, Any]]
    ) -> None:
        self._graph, self._value, self._meta = graph, value, meta
        self._nodes: dict[sympy.Symbol, fx.Node] = {}
        self._from_tensor: set[sympy.Symbol] = set()
        self._answers: dict[str, Any] = {}

    def add(self, number: Any, node: fx.Node, from_tensor: bool) -> None:
        """Note where a symbolic number comes from.

        Args:
            number: A SymInt, SymFloat or SymBool.
            node: The node whose value it is.
            from_tensor: Whether the user's code must not branch on it.
        """
        for symbol in number.node.expr.free_symbols:
            if symbol not in self._nodes:
                self._nodes[symbol] = node
                if from_tensor:
                    self._from_tensor.add(symbol)

    def answer(self, expr: sympy.Basic) -> Any:
        """Return the value of an expression; `ShapeEnv` asks where Python needs one."""
        text, symbols = guard_expression(expr)
        unknown = [s for s in symbols if s not in self._nodes]
        if unknown:
            raise CaptureError(
                f"a number of unknown origin ({unknown[0]}) decides a branch", user_line()
            )
        nodes = [self._nodes[s] for s in symbols]
        key = f"{text} {nodes}"
        if key not in self._answers:
            if not self._from_tensor.isdisjoint(symbols):
                refuse_user_control_flow()
            self._answers[key] = evaluate(text, [self._value(n) for n in nodes])
            node = self._graph.create_node(
                "call_function", ops.check_value, (text, self._answers[key], *nodes)
            )
            node.meta["custom"] = self._meta()
        return sympy.sympify(self._answers[key])


def guard_expression(expr: sympy.Basic) -> tuple[str, list[sympy.Symbol]]:
    """Return `expr` as Python source over `v0`, `v1`, ... and the symbols in that order."""
    symbols = sorted(expr.free_symbols, key=str)
    text = str(expr.xreplace({s: sympy.Symbol(f"v{i}") for i, s in enumerate(symbols)}))
    return text, symbols


def evaluate(expression: str, values: list[Any]) -> Any:
    """Evaluate a guard expression on the symbols' real values."""
    return eval(expression, ops._GUARD_SCOPE, {f"v{i}": v for i, v in enumerate(values)})
