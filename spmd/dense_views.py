"""Views of the global graph as reshapes: where strides say nothing, sizes say it all.

Without mutation a view and a copy are the same value, so every view may copy where the
real strides ask for it, and `as_strided` over a whole dense tensor is a reshape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def reshape_views(graph: fx.GraphModule) -> None:
    """Turn views into reshapes, in place.

    Real strides are not always the traced ones: `softplus_backward` on torch 2.13 keeps its
    operand's strides, its fake does not.
    """
    for node in graph.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.as_strided.default and _covers(node.args[0], node.args[1:]):
            node.target = aten.reshape.default
            node.args, node.kwargs = (node.args[0], node.args[1]), {}
        elif node.target is aten.as_strided_scatter.default:
            _replace_scatter(graph.graph, node)


def _replace_scatter(graph: fx.Graph, node: fx.Node) -> None:
    """A scatter over the whole of a dense tensor leaves nothing of it."""
    x: Any = node.args[0]
    if not _covers(x, node.args[2:]):
        return
    with graph.inserting_before(node):
        shape = list(x.meta["val"].shape)
        whole = graph.call_function(aten.reshape.default, (node.args[1], shape))
    whole.meta = dict(node.meta)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _covers(x: Any, view: tuple[Any, ...]) -> bool:
    """Whether `as_strided(x, *view)` is all of a dense `x`, in order."""
    fake: Tensor = x.meta["val"]
    size, stride = view[0], view[1]
    offset = view[2] if len(view) > 2 else None
    if not all(isinstance(n, int) for n in (*size, *stride)) or offset not in (None, 0):
        return False
    if not fake.is_contiguous() or fake.storage_offset() or math.prod(size) != fake.numel():
        return False
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
