"""Faults planted into the engine's local graphs, each a style named `planted:NAME`."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from spmd_verify.styles import graph as engine

aten = torch.ops.aten


def _is_wait(node: fx.Node) -> bool:
    """Say whether a node waits for a collective."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _reduced_gradients(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the waits for reduced gradients: read by the optimizer, and observed."""
    return [
        node
        for node in graph.graph.nodes
        if _is_wait(node) and len(node.users) > 1 and any(u.op == "output" for u in node.users)
    ]


def _replaced(graph: fx.GraphModule, node: fx.Node, target: Any, *args: Any) -> fx.GraphModule:
    """Let every user of `node` read `target(node, *args)` instead."""
    with graph.graph.inserting_after(node):
        made = graph.graph.call_function(target, (node, *args))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    graph.recompile()
    return graph


def scale(graph: fx.GraphModule, factor: float) -> fx.GraphModule:
    """Multiply the reduced gradient of one parameter."""
    return _replaced(graph, _reduced_gradients(graph)[0], aten.mul.Tensor, factor)


def scale_gradient(graph: fx.GraphModule) -> fx.GraphModule:
    """Multiply the reduced gradient of one parameter by 1.0001."""
    return scale(graph, 1.0001)


def mean_for_sum(graph: fx.GraphModule) -> fx.GraphModule:
    """Divide one reduced gradient by two ranks."""
    return _replaced(graph, _reduced_gradients(graph)[0], aten.div.Tensor, 2.0)


def drop_reduction(graph: fx.GraphModule) -> fx.GraphModule:
    """Leave the reduction of one gradient out: each rank goes on with its own share."""
    wait = _reduced_gradients(graph)[0]
    started = wait.args[0]
    assert isinstance(started, fx.Node)
    if started.target is operator.getitem:
        bucket, index = started.args
        assert isinstance(bucket, fx.Node)
        share = bucket.args[0][index]
    else:
        share = started.args[0]
    wait.replace_all_uses_with(share)
    graph.recompile()
    return graph


def stale_buffers(graph: fx.GraphModule) -> fx.GraphModule:
    """Write back the buffers that came in."""
    inputs = {n.name: n for n in graph.graph.nodes if n.op == "placeholder"}
    output = next(node for node in graph.graph.nodes if node.op == "output")
    signature = graph.meta["signature"]
    positions = list(inputs.values())
    leaves = list(output.args[0])
    for i, spec in enumerate(signature.outputs):
        if spec.kind == "buffer" and "running" in spec.name:
            leaves[i] = positions[signature.index("buffer", spec.name)]
    output.args = (tuple(leaves),)
    graph.recompile()
    return graph


def shift_shard(graph: fx.GraphModule) -> fx.GraphModule:
    """Roll one reduced gradient by one row, as a shard of the wrong rows would be."""
    node = _reduced_gradients(graph)[0]
    return _replaced(graph, node, aten.roll.default, [1], [0])


def flipped_low_bit(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose largest element has its lowest bit flipped."""
    flipped = value.detach().clone().contiguous()
    bits = flipped.view(torch.int64 if value.dtype == torch.float64 else torch.int32).reshape(-1)
    bits[int(flipped.abs().argmax())] ^= 1
    return flipped


def flip_low_bit(graph: fx.GraphModule) -> fx.GraphModule:
    """Flip one low bit in one reduced gradient."""
    return _replaced(graph, _reduced_gradients(graph)[0], flipped_low_bit)


DROPPED = replace(engine.REPLICATE, name="dropped", transformation=drop_reduction)
FLIPPED = replace(engine.REPLICATE, name="flipped", transformation=flip_low_bit)
FLIPPED_SHARD = replace(engine.FULLY_SHARD, name="flipped_shard", transformation=flip_low_bit)
HALVED = replace(engine.REPLICATE, name="halved", transformation=mean_for_sum)
SCALED = replace(engine.REPLICATE, name="scaled", transformation=scale_gradient)
SCALED_SHARD = replace(engine.FULLY_SHARD, name="scaled_shard", transformation=scale_gradient)
SHIFTED = replace(engine.REPLICATE, name="shifted", transformation=shift_shard)
STALE = replace(engine.REPLICATE, name="stale", transformation=stale_buffers)
