"""Constants and broadcasts that are wanted in parts are made in parts, not made whole and cut.

The backward of a mean begins with one number expanded to the shape of the batch. It is the
same on every rank, so expansion computes it replicated; who reads it wants a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from spmd.emit import Emitter
from spmd.layout import Layout, Replicate, Shard
from spmd.plan import Value

aten = torch.ops.aten

# Operators that fill a size with one value -> position of the size.
_FILLS = {
    aten.full.default: 0, aten.ones.default: 0, aten.zeros.default: 0,
    aten.new_full.default: 1, aten.new_ones.default: 1, aten.new_zeros.default: 1,
}  # fmt: skip

Resolve = Callable[[fx.Node], Any]


def narrowed(emitter: Emitter, node: fx.Node, layout: Layout, resolve: Resolve) -> fx.Node | None:
    """Return a local node that makes the part of `node` that `layout` says, or None.

    Args:
        emitter: Appends to the local graph.
        node: Global node whose value is replicated.
        layout: Splits dims along which the value is constant; else None is returned.
        resolve: Global node -> its value.
    """
    if not all(isinstance(p, Replicate | Shard) for p in layout.placements):
        return None
    dims = {p.dim for p in layout.placements if isinstance(p, Shard)}
    return _made(emitter, node, layout, resolve) if _is_constant_along(node, dims) else None


def _sources(node: fx.Node) -> list[tuple[fx.Node, dict[int, int]]] | None:
    """Return the tensors a node is made of, element by element, or None for other nodes.

    With each comes {dim of the node: dim of the tensor}, without the dims it is repeated along.
    """
    fake = node.meta.get("val")
    if node.op != "call_function" or not isinstance(fake, Tensor):
        return None
    if node.target in _FILLS:
        return []
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if node.target is aten.t.default and fake.dim() == 2:
        return [(tensors[0], {0: 1, 1: 0})]
    if node.target is aten.permute.default:
        given: Any = node.args[1]
        order = [d % fake.dim() for d in given]
        return [(tensors[0], dict(enumerate(order)))]
    tags = getattr(node.target, "tags", ())
    is_plain = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if not (is_plain or node.target is aten.expand.default):
        return None
    return [(n, _aligned(n.meta["val"].shape, fake.shape)) for n in tensors]


def _aligned(source: torch.Size, shape: torch.Size) -> dict[int, int]:
    missing = len(shape) - len(source)
    return {
        d: d - missing
        for d in range(missing, len(shape))
        if source[d - missing] != 1 or shape[d] == 1
    }


def _is_constant_along(node: fx.Node, dims: set[int]) -> bool:
    """Whether a value repeats along `dims` by the way it is made."""
    if not dims:
        return True
    sources = _sources(node)
    if sources is None:
        return False
    return all(_is_constant_along(n, {m[d] for d in dims if d in m}) for n, m in sources)


def _made(emitter: Emitter, node: fx.Node, layout: Layout, resolve: Resolve) -> fx.Node | None:
    found: dict[fx.Node, fx.Node] = {}
    for source, dims in _sources(node) or ():
        moved = Layout(
            tuple(
                p.moved(dims[p.dim]) if isinstance(p, Shard) and p.dim in dims else Replicate()
                for p in layout.placements
            )
        )
        value = resolve(source)
        form = value.forms.get(moved) if isinstance(value, Value) else None
        if form is None and not moved.is_replicated:
            form = _made(emitter, source, moved, resolve)
        if form is None:
            return None
        found[source] = form
    args = list(fx.node.map_arg(node.args, lambda n: found[n] if n in found else _any(resolve(n))))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: found[n] if n in found else _any(resolve(n)))
    target: Any = node.target
    at = 1 if target is aten.expand.default else _FILLS.get(target)
    if at is not None:
        args[at] = emitter.sizes(tuple(node.meta["val"].shape), layout)
    part = emitter.call(target, args, kwargs)
    part.meta["layout"], part.meta["global"] = layout, node.name
    return part


def _any(value: Any) -> Any:
    """Return a number as it is; of a tensor that is not read, any form."""
    return next(iter(value.forms.values())) if isinstance(value, Value) else value
