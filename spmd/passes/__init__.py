"""Graph passes: valid graph in, valid graph out, numbers identical; a pipeline is a tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import fx

from spmd.errors import UsageError
from spmd.passes.buckets import BucketGradientReductions
from spmd.passes.waits import PlaceWaitsLate, WaitForGathersAtOnce

__all__ = [
    "BucketGradientReductions",
    "Pass",
    "PlaceWaitsLate",
    "WaitForGathersAtOnce",
    "checked_graph",
    "default_passes",
    "run_passes",
]


@runtime_checkable
class Pass(Protocol):
    """One graph rewrite, a frozen dataclass with a name."""

    name: str

    def apply(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the rewritten graph; may change and return its argument."""
        ...


def default_passes() -> tuple[Pass, ...]:
    """Return the default pipeline."""
    return (BucketGradientReductions(), PlaceWaitsLate())


def run_passes(
    graph_module: fx.GraphModule, passes: Sequence[Any] | Callable[[Any], Any]
) -> fx.GraphModule:
    """Run passes in order, checking the graph after each.

    Args:
        graph_module: Local graph.
        passes: `Pass` objects or plain callables from graph to graph; or one callable.
    """
    meta = graph_module.meta
    for step in (passes,) if callable(passes) else passes:
        apply = step.apply if isinstance(step, Pass) else step
        graph_module = checked_graph(apply(graph_module), f"The pass {step}")
        graph_module.meta.update({k: v for k, v in meta.items() if k not in graph_module.meta})
        graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def checked_graph(result: Any, source: str) -> fx.GraphModule:
    """Return what user code made of the local graph.

    Args:
        result: What it returned.
        source: Who, for the message.

    Raises:
        UsageError: `not-a-graph`, if it is no GraphModule.
    """
    if not isinstance(result, fx.GraphModule):
        raise UsageError(
            f"{source} returned {type(result).__name__}, expected the GraphModule it was given or "
            "another one. Return the graph also where it was changed in place.",
            "not-a-graph",
        )
    return result
