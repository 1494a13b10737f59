"""Bring a value from one layout to another: slices, pads and functional collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from spmd import runtime
from spmd.emit import Emitter
from spmd.errors import InternalError
from spmd.layout import REPLICATE, Layout, Partial, Placement, Replicate, Shard

aten = torch.ops.aten
collective = torch.ops._c10d_functional


def redistribute(
    emitter: Emitter, node: fx.Node, value: Any, have: Layout, wanted: Layout
) -> list[tuple[Layout, fx.Node]]:
    """Emit the nodes that bring `node` from layout `have` to layout `wanted`.

    Args:
        emitter: The local graph.
        node: Local node in layout `have`.
        value: The global value: `shape` and `dtype`.
        have: Where the parts are.
        wanted: Where they have to be.

    Returns:
        Every layout reached on the way with its node, the last is `wanted`.
    """
    steps: list[tuple[Layout, fx.Node]] = []
    for axis, target in _moves(have, wanted):
        mover = _Move(emitter, value, have, axis)
        node = mover.to(node, target)
        have = have.replace(axis, target)
        steps.append((have, node))
    return steps


def _moves(have: Layout, wanted: Layout) -> list[tuple[int, Placement]]:
    """Return (axis, placement it moves to) in an order that never splits one dim twice."""
    axes = range(len(have.placements))
    paths = [_path(a, b) for a, b in zip(have.placements, wanted.placements, strict=True)]

    def is_in_the_way(axis: int) -> bool:
        own = have.placements[axis]
        return isinstance(own, Shard) and any(
            isinstance(p, Shard) and p.dim == own.dim and other != axis and bool(paths[other])
            for other, p in enumerate(wanted.placements)
        )

    blocking = [a for a in axes if paths[a] and is_in_the_way(a)]
    first = [(a, paths[a].pop(0)) for a in blocking]
    # What is whole by now is cut after everything that is still split or partial.
    moved = {a for a, _ in first}
    order = sorted(axes, key=lambda a: a in moved or isinstance(have.placements[a], Replicate))
    return first + [(a, target) for a in order for target in paths[a]]


def _path(have: Placement, wanted: Placement) -> list[Placement]:
    if have == wanted:
        return []
    if isinstance(have, Shard) and not isinstance(wanted, Replicate):
        return [REPLICATE, wanted]
    if isinstance(have, Partial) and isinstance(wanted, Shard):
        # A sum over a block of ranks gives parts within it only.
        if have.op == "sum" and wanted.outer == 1 and have.block in (0, len(wanted.units)):
            return [wanted]
        return [REPLICATE, wanted]
    if isinstance(have, Partial) and isinstance(wanted, Partial):
        return [REPLICATE, wanted]
    return [wanted]


def _block(placement: Placement) -> int:
    """Return over how many consecutive ranks a placement goes; 0 for all of the axis."""
    if isinstance(placement, Shard):
        return len(placement.units)
    return placement.block if isinstance(placement, Partial) else 0


class _Move:
    """One step on one axis; `value.shape` is global, other axes of `layout` stay."""

    def __init__(self, emitter: Emitter, value: Any, layout: Layout, axis: int) -> None:
        self.emitter, self.axis = emitter, axis
        self.have = layout.placements[axis]
        self.group, self.ranks = emitter.mesh.span(axis, _block(self.have))
        self.shape, self.dtype = value.shape, value.dtype
        self.layout = layout

    def to(self, node: fx.Node, wanted: Placement) -> fx.Node:
        """Return the node in placement `wanted`."""
        if isinstance(wanted, Shard) and isinstance(self.have, Replicate):
            return self._slice(node, wanted)
        if isinstance(wanted, Shard) and isinstance(self.have, Partial):
            return self._reduce_scatter(node, wanted)
        if isinstance(wanted, Replicate) and isinstance(self.have, Shard):
            return self._all_gather(node, self.have)
        if isinstance(wanted, Replicate) and isinstance(self.have, Partial):
            return self._all_reduce(node, self.have)
        if isinstance(wanted, Partial) and isinstance(self.have, Replicate):
            _, ranks = self.emitter.mesh.span(self.axis, wanted.block)
            coordinate = self.emitter.pick(self.axis, tuple(range(ranks)))
            return self._call(runtime.first_rank_only, node, coordinate)
        raise InternalError(f"no way from {self.have} to {wanted}; please report it")

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.emitter.call(target, args, kwargs)

    def _local_shape(self) -> list[Any]:
        return self.emitter.sizes(self.shape, self.layout)

    def _exposed(self, node: fx.Node, dim: int, factors: list[Any]) -> fx.Node:
        """View dim `dim` of a local node as several dims."""
        shape = self._local_shape()
        return self._call(aten.reshape.default, node, shape[:dim] + factors + shape[dim + 1 :])

    def _slice(self, node: fx.Node, wanted: Shard) -> fx.Node:
        starts = list(wanted.offsets())
        ends = [s + n for s, n in zip(starts, wanted.units, strict=True)]
        start = self.emitter.pick(self.axis, starts)
        end = self.emitter.pick(self.axis, ends)
        if wanted.outer == 1:
            return self._call(aten.slice.Tensor, node, wanted.dim, start, end)
        middle = sum(wanted.units)
        split = self._exposed(node, wanted.dim, [wanted.outer, middle])
        part = self._call(aten.slice.Tensor, split, wanted.dim + 1, start, end)
        shape = self.emitter.sizes(self.shape, self.layout.replace(self.axis, wanted))
        return self._call(aten.reshape.default, part, shape)

    def _wait(self, node: fx.Node) -> fx.Node:
        return self._call(collective.wait_tensor.default, node)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        return self._call(aten.contiguous.default, node)

    def _all_reduce(self, node: fx.Node, have: Partial) -> fx.Node:
        return self._reduced(node, have.op, self.group)

    def _reduced(self, node: fx.Node, op: str, group: str) -> fx.Node:
        narrow = self.dtype == torch.bool
        if narrow:
            node = self._call(aten._to_copy.default, node, dtype=torch.uint8)
        reduced = self._wait(
            self._call(collective.all_reduce.default, self._contiguous(node), op, group)
        )
        if narrow:
            return self._call(aten._to_copy.default, reduced, dtype=torch.bool)
        return reduced

    def _all_gather(self, node: fx.Node, have: Shard) -> fx.Node:
        if not sum(have.units):
            return node  # a dim of no elements: every part is the whole
        dim = have.dim
        if have.outer > 1:
            units = self.emitter.pick(self.axis, have.units)
            node = self._exposed(node, dim, [have.outer, units])
            dim += 1
        most = max(have.units)
        if min(have.units) != most:
            missing = self.emitter.pick(self.axis, [most - n for n in have.units])
            trailing = [0] * (2 * (self._ndim(have) - dim - 1))
            node = self._call(aten.constant_pad_nd.default, node, [*trailing, 0, missing])
        gathered = self._wait(
            self._call(
                collective.all_gather_into_tensor.default,
                self._contiguous(node), self.ranks, self.group,
            )
        )  # fmt: skip
        if dim == 0 and min(have.units) == most:
            return gathered
        whole = self._joined(gathered, have, dim, most)
        if have.outer > 1:
            shape = self.emitter.sizes(self.shape, self.layout.replace(self.axis, REPLICATE))
            whole = self._call(aten.reshape.default, whole, shape)
        return whole

    def _ndim(self, placement: Shard) -> int:
        return len(self.shape) + (placement.outer > 1)

    def _joined(self, gathered: fx.Node, have: Shard, dim: int, most: int) -> fx.Node:
        """Cut the padding off the ranks' parts, stacked on dim 0, and join them on `dim`."""
        pieces = []
        if dim:
            shape = self._padded_shape(have, most)
            gathered = self._call(aten.reshape.default, gathered, [self.ranks, *shape])
        for rank, size in enumerate(have.units):
            if size == 0:
                continue
            if dim:
                piece = self._call(aten.select.int, gathered, 0, rank)
                if size != most:
                    piece = self._call(aten.slice.Tensor, piece, dim, 0, size)
            else:
                start = rank * most
                piece = self._call(aten.slice.Tensor, gathered, 0, start, start + size)
            pieces.append(piece)
        return self._call(aten.cat.default, pieces, dim)

    def _padded_shape(self, have: Shard, most: int) -> list[Any]:
        shape: list[Any] = self.emitter.sizes(self.shape, self.layout)
        shape[have.dim : have.dim + 1] = [have.outer, most] if have.outer > 1 else [most]
        return shape

    def _reduce_scatter(self, node: fx.Node, wanted: Shard) -> fx.Node:
        """Sum over the ranks, each keeping its part; parts are padded to the largest.

        Where the parts repeat, ranks of one block sum and divide, then the blocks sum.
        """
        group, ranks = self.emitter.mesh.span(self.axis, len(wanted.units))
        dim, most = wanted.dim, max(wanted.units)
        if not most:
            return node
        even = min(wanted.units) == max(wanted.units)
        if dim or not even:
            pieces = []
            for start, size in zip(wanted.offsets(), wanted.units, strict=True):
                piece = self._call(aten.slice.Tensor, node, dim, start, start + size)
                if size != most:
                    trailing = [0] * (2 * (len(self.shape) - dim - 1))
                    pad = [*trailing, 0, most - size]
                    piece = self._call(aten.constant_pad_nd.default, piece, pad)
                pieces.append(piece)
            node = self._call(aten.cat.default, pieces, 0)
        scattered = self._wait(
            self._call(
                collective.reduce_scatter_tensor.default,
                self._contiguous(node), "sum", ranks, group,
            )
        )  # fmt: skip
        if ranks != self.ranks:
            for outer, _ in self.emitter.mesh.parts[:-1]:
                scattered = self._reduced(scattered, "sum", outer)
        if even:
            return scattered
        own = self.emitter.pick(self.axis, wanted.units)
        return self._call(aten.slice.Tensor, scattered, dim, 0, own)
