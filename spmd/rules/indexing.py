"""Gathers and scatters by index: what is looked up, where from, and what is added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.layout import Shard
from spmd.rules.base import Call, DimRule, Label, Rule, aligned, rule
from spmd.rules.iota import counting_dim

aten = torch.ops.aten


@rule(aten.gather.default)
def _gather(call: Call) -> Rule:
    x, index = call.operands
    dim = call.argument("dim") % max(x.dim(), 1)
    free = [_if_equal(x, index, i, dim) for i in range(x.dim())]
    position: list[Label | None] = list(free)
    if x.dim():
        position[dim] = "positions"
    return DimRule([free, position], [position], linear=(frozenset((0,)),))


def _if_equal(x: Tensor, index: Tensor, i: int, dim: int) -> Label | None:
    return i if i != dim and x.shape[i] == index.shape[i] else None


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
    aten.scatter.reduce, aten.scatter.value_reduce,
)  # fmt: skip
def _scatter(call: Call) -> Rule:
    x, index = call.operands[0], call.operands[1]
    dim = call.argument("dim") % max(x.dim(), 1)
    free = [_if_equal(x, index, i, dim) for i in range(x.dim())]
    inputs: list[Any] = [free, free]
    if len(call.operands) == 3:
        source = call.operands[2]
        same = source.shape == index.shape
        inputs.append(free if same else [None] * source.dim())
        if call.target == aten.scatter_add.default and same:
            return _Accumulate(inputs, [free], "positions", dim)
        if call.target == aten.scatter_reduce.two and same and call.argument("include_self"):
            op = {"amax": "max", "amin": "min"}.get(call.argument("reduce"))
            if op is not None:
                return _Extreme(inputs, [free], dim, op)
    return DimRule(inputs, [free])


class _Extreme(DimRule):
    """Scatters the largest or smallest; a split of the positions gives a partial extreme."""

    skips_empty = False  # without positions the tensor added into is still there

    def __init__(self, inputs: Any, outputs: Any, dim: int, op: Any) -> None:
        super().__init__(inputs, outputs)
        self._dim, self._op = dim, op

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        """Yield the free dims, and positions beside a whole tensor: it may count many times."""
        from spmd.layout import REPLICATE, Partial, Shard
        from spmd.rules.base import Candidate

        yield from super().candidates(call, placements, num_ranks)
        for placement in (*placements[1], *placements[2]):
            if isinstance(placement, Shard) and placement.dim == self._dim:
                yield Candidate((REPLICATE, placement, placement), (Partial(self._op),))


class _Accumulate(DimRule):
    """Adds source rows into a tensor; a split of the positions gives a partial sum.

    The tensor added into must then be a partial sum itself: a replicated one counts on
    the first rank only.
    """

    skips_empty = False  # without positions the tensor added into is still there

    def __init__(self, inputs: Any, outputs: Any, label: str, dim: int, source: int = 2) -> None:
        super().__init__(inputs, outputs)
        self._label, self._dim, self._source = label, dim, source

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        from spmd.layout import REPLICATE, Partial, Shard
        from spmd.rules.base import Candidate

        yield from super().candidates(call, placements, num_ranks)
        partial = Partial("sum")
        source = self._source
        # The position dim of each operand: an index of one dim is that dim.
        at = [0 if x.dim() == 1 else self._dim for x in call.operands]
        for operand in range(1, len(placements)):
            for placement in placements[operand]:
                if isinstance(placement, Shard) and placement.dim == at[operand]:
                    split = [placement.moved(dim) for dim in at[1:]]
                    yield Candidate((partial, *split), (partial,))
        if partial in placements[source]:
            inputs: list[Any] = [REPLICATE] * len(placements)
            inputs[0] = inputs[source] = partial
            yield Candidate(tuple(inputs), (partial,))


@rule(aten.index_select.default)
def _index_select(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % max(x.dim(), 1)
    free: list[Any] = [None if i == dim else i for i in range(x.dim())]
    out: list[Any] = ["positions" if i == dim else i for i in range(x.dim())]
    return DimRule([free, ["positions"]], [out], linear=(frozenset((0,)),))


@rule(aten.index_add.default)
def _index_add(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % max(x.dim(), 1)
    free = [None if i == dim else i for i in range(x.dim())]
    return _Accumulate([free, [None], free], [free], "positions", dim)


@rule(aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_copy(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.argument("dim") % max(x.dim(), 1)
    free = [None if i == dim else i for i in range(x.dim())]
    rest = [free if y.dim() == x.dim() else [None] * y.dim() for y in call.operands[1:]]
    return DimRule([free, *rest], [free])


class _Indexing:
    """Dims of an advanced-indexing call: which are indexed, where the result's new dims are."""

    def __init__(self, x: Tensor, indices: Any) -> None:
        self.indices = list(indices) + [None] * (x.dim() - len(indices))
        tensors = [i.meta["val"] for i in self.indices if i is not None]
        self.indexed = [d for d, i in enumerate(self.indices) if i is not None]
        self.shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        self.new = [f"n{i}" for i in range(len(self.shape))]
        consecutive = self.indexed == list(range(self.indexed[0], self.indexed[-1] + 1))
        self.at = self.indexed[0] if consecutive else 0
        self.source: list[Label | None] = [
            None if i is not None else d for d, i in enumerate(self.indices)
        ]
        kept: list[Label] = [d for d in self.source if d is not None]
        position = sum(1 for d in kept if d < self.at) if consecutive else 0
        self.result: list[Label] = [*kept[:position], *self.new, *kept[position:]]
        self.position = position
        self.kept = kept
        self.counted = self._counted(x)
        for dim, new in self.counted.items():
            self.source[dim] = self.new[new]

    def _counted(self, x: Tensor) -> dict[int, int]:
        """Return {indexed dim: new dim} where the index counts the dim's rows in order."""
        found: dict[int, int] = {}
        for dim in self.indexed:
            index = self.indices[dim]
            along = counting_dim(index)
            if along is None:
                continue
            new = along + len(self.shape) - index.meta["val"].dim()
            same_size = index.meta["val"].shape[along] == x.shape[dim] == self.shape[new]
            if same_size and new not in found.values():
                found[dim] = new
        return found

    def index_labels(self) -> list[list[Label | None]]:
        labels = []
        for index in self.indices:
            if index is not None:
                shape = index.meta["val"].shape
                raw = aligned(shape, len(self.shape), self.shape)
                labels.append([None if i is None else self.new[i] for i in raw])
        return labels


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Rule:
    dims = _Indexing(call.operands[0], call.argument("indices"))
    labels = [dims.source, *dims.index_labels()]
    local = _local_rows(dims)
    return _Lookup(labels, [dims.result], linear=(frozenset((0,)),), local_args=local)


class _Lookup(DimRule):
    """A counted dim may be split only into runs of rows: tiled splits have no single offset."""

    def _sharded(self, label: Label, placement: Shard) -> Any:
        if placement.outer > 1 and label in self.inputs[0] and isinstance(label, str):
            return None
        return super()._sharded(label, placement)


def _local_rows(dims: _Indexing) -> Any:
    """Where a counted dim is split, its index must count from 0 on every rank."""
    if not dims.counted:
        return None

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        indices = list(args[1])
        for dim in dims.counted:
            for axis, placement in enumerate(emitter.inputs[0].placements):
                if isinstance(placement, Shard) and placement.dim == dim:
                    start = emitter.pick(axis, placement.offsets())
                    indices[dim] = emitter.call(aten.sub.Tensor, (indices[dim], start), {})
        args[1] = indices

    return local


@rule(aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl)
def _index_put(call: Call) -> Rule:
    """Kept dims are free; with accumulate, a split of the positions gives a partial sum."""
    x, values = call.operands[0], call.operands[-1]
    dims = _Indexing(x, call.argument("indices"))
    shape = _result_shape(x, dims)
    raw = aligned(values.shape, len(shape), shape)
    source = [None if i is None else dims.result[i] for i in raw]
    inputs = [dims.source, *dims.index_labels(), source]
    if not call.argument("accumulate"):
        # Later positions overwrite earlier ones, so only rows counted in order are free.
        free = {dims.new[new] for new in dims.counted.values()}
        whole = [
            [None if isinstance(m, str) and m not in free else m for m in labels]
            for labels in inputs
        ]
        return _Lookup(whole, [whole[0]], local_args=_local_rows(dims))
    return _AccumulateAt(inputs, [dims.source], dims.new, _local_rows(dims))


def _result_shape(x: Tensor, dims: _Indexing) -> list[int]:
    kept = [x.shape[d] for d in dims.kept]
    return [*kept[: dims.position], *dims.shape, *kept[dims.position :]]


class _AccumulateAt(_Lookup):
    """index_put with accumulate: positions split over ranks give a partial sum."""

    skips_empty = False  # without positions the tensor added into is still there

    def __init__(self, inputs: Any, outputs: Any, new: list[Label], local: Any) -> None:
        super().__init__(inputs, outputs, local_args=local)
        self._new = set(new)

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Any:
        from spmd.layout import REPLICATE, Partial, Shard
        from spmd.rules.base import Candidate, _place

        yield from super().candidates(call, placements, num_ranks)
        partial = Partial("sum")
        last = len(placements) - 1
        for operand in range(1, len(placements)):
            for placement in placements[operand]:
                if not isinstance(placement, Shard):
                    continue
                label = self.inputs[operand][placement.dim]
                if label in self._new and label in self.inputs[last]:
                    placed = [_place(labels, label, placement) for labels in self.inputs[1:]]
                    yield Candidate((partial, *placed), (partial,))
        if partial in placements[last]:
            inputs: list[Any] = [REPLICATE] * len(placements)
            inputs[0] = inputs[last] = partial
            yield Candidate(tuple(inputs), (partial,))


@rule(aten.take_along_dim, aten.masked_scatter.default)
def _masked_scatter(call: Call) -> Rule | None:
    """The n-th true position takes the n-th element of the source: order is global."""
    from spmd.rules.base import Whole

    return Whole()


@rule(aten.one_hot)
def _one_hot(call: Call) -> Rule:
    ndim = call.operands[0].dim()
    return DimRule([list(range(ndim))], [[*range(ndim), None]])


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _bag(call: Call) -> Rule | None:
    return None
