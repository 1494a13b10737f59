"""Graph passes: valid graph in, valid graph out, numbers identical; a pipeline is a tuple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import fx

from spmd.passes.buckets import BucketGradientReductions
from spmd.passes.waits import PlaceWaitsLate

__all__ = ["BucketGradientReductions", "Pass", "PlaceWaitsLate", "default_passes", "run_passes"]


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
        graph_module = apply(graph_module)
        graph_module.meta.update({k: v for k, v in meta.items() if k not in graph_module.meta})
        graph_module.graph.lint()
        graph_module.recompile()
    return graph_module
