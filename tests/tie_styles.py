"""The engine's `replicate` with router scores that differ, as styles named `tie_styles:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from planted import scale
from torch import Tensor, fx

from spmd_verify.styles import graph as engine

aten = torch.ops.aten


def one_ulp_up(scores: Tensor) -> Tensor:
    """Return scores as another order of summation may round them."""
    moved = scores.clone()
    moved[:, 2] = torch.nextafter(scores[:, 2], torch.tensor(torch.inf))
    return moved


def half_up(scores: Tensor) -> Tensor:
    """Return scores that prefer one expert."""
    moved = scores.clone()
    moved[:, 2] += 0.5
    return moved


def with_scores(change: Callable[[Tensor], Tensor]) -> engine.Transformation:
    """Return what lets every topk of a graph decide by changed scores."""

    def rewrite(graph: fx.GraphModule) -> fx.GraphModule:
        for node in graph.graph.find_nodes(op="call_function", target=aten.topk.default):
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(change, (node.args[0],))
            made.meta = dict(node.args[0].meta)
            node.args = (made, *node.args[1:])
        graph.recompile()
        return graph

    return rewrite


def ulp_and_fault(graph: fx.GraphModule) -> fx.GraphModule:
    """Move the scores by an ulp and one gradient by a hundredth."""
    return scale(with_scores(one_ulp_up)(graph), 1.01)


ROUNDED = replace(engine.REPLICATE, name="rounded", transformation=with_scores(one_ulp_up))
FAR = replace(engine.REPLICATE, name="far", transformation=with_scores(half_up))
FAULTY = replace(engine.REPLICATE, name="faulty", transformation=ulp_and_fault)
