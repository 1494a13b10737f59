"""Wait for a collective where its result is read, not where it was started."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class PlaceWaitsLate:
    """Move every wait to just before the first reader of its result; numbers identical."""

    name: str = "place_waits_late"

    def apply(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the graph with its waits moved, in place; the pipeline recompiles it."""
        graph = graph_module.graph
        waits = graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
        )
        order = {node: i for i, node in enumerate(graph.nodes)}
        for wait in waits:
            if wait.users:
                min(wait.users, key=order.__getitem__).prepend(wait)
        return graph_module
