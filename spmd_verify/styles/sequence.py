"""A tensor dim that is split over the ranks of a group and put together again, with gradients.

Outside, every rank has the whole tensor and the whole gradient, the same on all; inside, it has
the indices of the dim that are its own. No gradient is summed here: each element has one owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Which indices of a dim each rank of a group owns.

    Attributes:
        group: The ranks.
        places: Per rank, its indices, in its order; every index once. A rank may own none.
    """

    group: dist.ProcessGroup
    places: tuple[Tensor, ...]

    @property
    def own(self) -> Tensor:
        """Return this rank's indices."""
        return self.places[self.group.rank()]


def chunked(size: int, group: dist.ProcessGroup, device: torch.device) -> Split:
    """Return the split of torch.chunk: consecutive parts, the last ones smaller or empty."""
    part = -(-size // group.size())
    edges = [min(rank * part, size) for rank in range(group.size() + 1)]
    places = (torch.arange(*edges[rank : rank + 2], device=device) for rank in range(group.size()))
    return Split(group, tuple(places))


def part_of(whole: Tensor, dim: int, split: Split) -> Tensor:
    """Return this rank's part, R -> S(dim); backward gathers the gradient, S(dim) -> R."""
    part: Tensor = _Part.apply(whole, dim, split)
    return part


def whole_of(part: Tensor, dim: int, split: Split) -> Tensor:
    """Return the whole, S(dim) -> R; backward takes this rank's part of the gradient."""
    whole: Tensor = _Whole.apply(part, dim, split)
    return whole


def gathered(part: Tensor, dim: int, split: Split) -> Tensor:
    """Return the whole of every rank's part, S(dim) -> R, without a gradient.

    Parts are padded to the longest: gloo gathers equal shapes only.
    """
    sizes = [len(places) for places in split.places]
    rows = part.movedim(dim, 0)
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=split.group)
    joined = torch.cat([each[:size] for each, size in zip(everyone, sizes, strict=True)])
    order = torch.cat(split.places).argsort()
    whole = joined.index_select(0, order)
    # No view: what a custom function returns as one cannot be changed in place.
    return whole if dim == 0 else whole.movedim(0, dim).clone()


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, split: Split) -> Tensor:
        ctx.dim, ctx.split = dim, split
        return whole.index_select(dim, split.own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return whole_of(gradients[0], ctx.dim, ctx.split), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, split: Split) -> Tensor:
        ctx.dim, ctx.split = dim, split
        return gathered(part, dim, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return part_of(gradients[0], ctx.dim, ctx.split), None, None
