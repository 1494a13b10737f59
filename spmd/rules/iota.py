"""Which integer tensors count: 0, 1, 2, ... along one dim, the same along all others.

A lookup by such a tensor (`mask[batch_index, positions]`) reads row i for result row i, so
a split of the rows is a split of the result. Only what the graph proves is used: the
tensor must come from `arange` by views, copies and additions of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_SAME = {
    aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.contiguous.default,
}  # fmt: skip
_RESHAPES = {
    aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.expand.default,
}  # fmt: skip


def counting_dim(node: fx.Node) -> int | None:
    """Return the dim along which a traced integer tensor is 0, 1, 2, ..., or None.

    Args:
        node: A node of the global graph whose value is a tensor.

    Returns:
        The dim; along every other one the tensor is constant.
    """
    out: Any = node.meta.get("val")
    if not isinstance(out, Tensor) or node.op != "call_function":
        return None
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return 0 if _from_zero(node) else None
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target in _SAME:
        return None if out.is_floating_point() else counting_dim(node.args[0])
    if node.target is aten.add.Tensor:
        return counting_dim(node.args[0]) if _is_zero(node.args[1]) else None
    if node.target in _RESHAPES:
        dim = counting_dim(node.args[0])
        return None if dim is None else _moved(dim, node.args[0].meta["val"], out)
    return None


def _from_zero(node: fx.Node) -> bool:
    if node.target is aten.arange.default:
        return True
    step = node.args[2] if len(node.args) > 2 else 1
    return _is_zero(node.args[0]) and step == 1


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _moved(dim: int, x: Tensor, out: Tensor) -> int | None:
    """Return where dim `dim` is after a view that adds, drops or expands dims of size 1."""
    size = x.shape[dim]
    if size == 1:
        return None
    if any(n != 1 for i, n in enumerate(x.shape) if i != dim):
        # Constant along other real dims already: only a plain expansion keeps the order.
        shift = out.dim() - x.dim()
        same = shift >= 0 and all(n in (1, out.shape[i + shift]) for i, n in enumerate(x.shape))
        return dim + shift if same and out.shape[dim + shift] == size else None
    places = [i for i, n in enumerate(out.shape) if n == size]
    if out.numel() == size:
        return places[0] if len(places) == 1 else None
    shift = out.dim() - x.dim()
    return dim + shift if shift >= 0 and out.shape[dim + shift] == size else None
