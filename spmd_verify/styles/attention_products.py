"""Attention that is written by hand: a product, a softmax over keys, a product.

While one device runs the step, `ProductWatch` finds such products by following values from the
first product through the softmax into the second. `SplitProducts` then computes products of these
sizes with the queries over the ranks, forward and backward: each is exact whatever it belongs to,
so what was found decides only what is divided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.reference.observe import is_in_backward
from spmd_verify.styles.sequence import chunked, gathered

aten = torch.ops.aten

# Sizes of a product: leading ones, rows, summed over, columns. `mm` has no leading ones.
Sizes = tuple[int, ...]
_PRODUCTS: Final = (aten.mm.default, aten.bmm.default, aten.baddbmm.default)
_SOFTMAX: Final = (aten._softmax.default, aten._safe_softmax.default)


@dataclass(frozen=True)
class Products:
    """Sizes of the products of attention.

    Attributes:
        by_row: Products whose rows are queries.
        summed: Products that sum over queries: backward, for keys and values.
    """

    by_row: frozenset[Sizes] = frozenset()
    summed: frozenset[Sizes] = frozenset()


@dataclass
class _Path:
    """Where a value comes from: sizes of a product of scores, and whether a softmax followed."""

    scores: Sizes
    is_share: bool = False


@dataclass
class ProductWatch:
    """Finds attention in what runs while it is active.

    Attributes:
        pairs: Sizes of scores and of the product with values.
        is_paused: Set while torch's own attention runs, which may consist of products.
    """

    pairs: set[tuple[Sizes, Sizes]] = field(default_factory=set)
    is_paused: bool = False

    def mode(self, model: nn.Module) -> TorchDispatchMode:
        """Return the context for one step of a model."""
        return _Watching(self, model)

    def products(self) -> Products:
        """Return what to divide."""
        by_row: set[Sizes] = set()
        summed: set[Sizes] = set()
        for scores, values in self.pairs:
            *lead, queries, width, keys = scores
            *_, out = values
            by_row |= {scores, values, (*lead, queries, keys, width), (*lead, queries, out, keys)}
            summed |= {(*lead, width, queries, keys), (*lead, keys, queries, out)}
        return Products(frozenset(by_row), frozenset(summed - by_row))


class _Watching(TorchDispatchMode):
    """Follows values by their storage, which views share; storages are kept, so none comes again.

    Products with parameters are layers: their results are no scores.
    """

    def __init__(self, watch: ProductWatch, model: nn.Module) -> None:
        super().__init__()
        self._watch = watch
        self._paths: dict[int, _Path] = {}
        self._kept: list[Any] = []
        self._parameters = {_storage(parameter) for parameter in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        made = out[0] if isinstance(out, (tuple, list)) and out else out
        is_passed = self._watch.is_paused or is_in_backward()
        if is_passed or not isinstance(made, Tensor) or not made.is_floating_point():
            return out
        path = self._path(func, args, made)
        if path is not None:
            self._paths[_storage(made)] = path
            self._kept.append(made.untyped_storage())
        return out

    def _path(self, func: Any, args: tuple[Any, ...], made: Tensor) -> _Path | None:
        """Return where a result comes from, as far as attention goes."""
        if func in _PRODUCTS:
            first, second = args[-2:]
            path = self._paths.get(_storage(first))
            sizes = sizes_of(first, second)
            is_layer = _storage(second) in self._parameters
            if path is not None and path.is_share and not is_layer:
                if first.shape[-1] == path.scores[-1] and first.shape[-2] == path.scores[-3]:
                    self._watch.pairs.add((path.scores, sizes))
                return None
            return None if is_layer else _Path(sizes)
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        found = (self._paths.get(_storage(each)) for each in tensors)
        path = next((each for each in found if each is not None), None)
        # Rows stay queries; columns may be more for a while, such as a sink beside the keys.
        if path is None or made.ndim < 2 or made.shape[-2] != path.scores[-3]:
            return None
        if func in _SOFTMAX and args[1] % made.ndim == made.ndim - 1:
            return _Path(path.scores, is_share=True)
        return path


class SplitProducts(TorchDispatchMode):
    """Context in which products of these sizes are computed by the ranks together.

    Attributes:
        tally: Products divided, by `forward` and `backward`.
    """

    def __init__(
        self, products: Products, group: dist.ProcessGroup, tally: Counter[tuple[str, str]]
    ) -> None:
        """Divide over a group; operands are whole and the same on every rank."""
        super().__init__()
        self.tally = tally
        self._products = products
        self._group = group

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Divide a product, or let the operator pass."""
        del types
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        first, second = args[-2:]
        sizes = sizes_of(first, second)
        if sizes in self._products.by_row:
            self._count()
            return self._by_row(func, args, kwargs)
        if sizes in self._products.summed and func is not aten.baddbmm.default:
            self._count()
            return self._summed(func, first, second)
        return func(*args, **kwargs)

    def _count(self) -> None:
        """Count a product."""
        self.tally["products", "backward" if is_in_backward() else "forward"] += 1

    def _by_row(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Multiply this rank's rows with the whole second operand; S(-2) -> R."""
        *added, first, second = args
        split = chunked(first.shape[-2], self._group, first.device)
        own = split.own
        rows = [
            each.index_select(-2, own) if each.ndim > 1 and each.shape[-2] > 1 else each
            for each in added
        ]
        part = func(*rows, first.index_select(-2, own), second, **kwargs)
        return gathered(part, -2, split)

    def _summed(self, func: Any, first: Tensor, second: Tensor) -> Tensor:
        """Multiply over this rank's queries and add up; P(sum) -> R."""
        own = chunked(first.shape[-1], self._group, first.device).own
        part = func(first.index_select(-1, own), second.index_select(-2, own)).contiguous()
        dist.all_reduce(part, group=self._group)
        return part


def sizes_of(first: Tensor, second: Tensor) -> Sizes:
    """Return the sizes of `first [..., rows, inner] @ second [..., inner, columns]`."""
    return (*first.shape, second.shape[-1])


def _storage(tensor: Tensor) -> int:
    """Return what names a tensor's memory."""
    return tensor.untyped_storage()._cdata
