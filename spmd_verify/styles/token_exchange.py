"""Rows that travel by all-to-all to the rank that works on them, and back, with gradients.

Outside, every rank has the whole tensor and the whole gradient. Each rank *holds* some rows,
sends each to its *owner*, and gets the results of the rows it holds; a gather makes them whole.
The two directions are each other's backward, so that no gradient is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_verify.styles.sequence import Split, chunked, gathered


@dataclass(frozen=True)
class Route:
    """Where every row of a tensor lies and where it is worked on.

    Attributes:
        group: The ranks.
        holders: Rank that sends and takes back each row, [rows].
        owners: Rank that works on each row, [rows].
    """

    group: dist.ProcessGroup
    holders: Tensor
    owners: Tensor

    def rows(self, holder: int, owner: int) -> Tensor:
        """Return the rows that go from one rank to another, in the whole's order."""
        return ((self.holders == holder) & (self.owners == owner)).nonzero().flatten()

    def owned(self) -> Tensor:
        """Return the rows this rank works on, in the whole's order."""
        return (self.owners == self.group.rank()).nonzero().flatten()

    def held(self) -> Split:
        """Return which rows every rank holds."""
        ranks = range(self.group.size())
        return Split(
            self.group, tuple((self.holders == rank).nonzero().flatten() for rank in ranks)
        )


def route(owners: Tensor, group: dist.ProcessGroup) -> Route:
    """Return the route of rows that the ranks hold in consecutive parts."""
    holders = torch.empty_like(owners)
    for rank, places in enumerate(chunked(len(owners), group, owners.device).places):
        holders[places] = rank
    return Route(group, holders, owners)


def sent(whole: Tensor, way: Route) -> Tensor:
    """Return the rows this rank owns, in the whole's order: R -> S(0) by owner.

    Backward returns the rows' gradients.

    Args:
        whole: [rows, ...], the same on every rank.
        way: Of its rows.
    """
    owned: Tensor = _Sent.apply(whole, way)
    return owned


def returned(owned: Tensor, way: Route) -> Tensor:
    """Return what the owners made of the rows, whole on every rank: S(0) by owner -> R.

    Backward sends the rows' gradients.
    """
    whole: Tensor = _Returned.apply(owned, way)
    return whole


def spread(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the same values, of which every rank has sent each other its own: R -> R.

    Each rank then goes on with a part of the work, so backward adds up: `collected`.
    """
    copy: Tensor = _Spread.apply(whole, group)
    return copy


def collected(summand: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' summands, P(sum) -> R, by all-to-all and a gather."""
    total: Tensor = _Collected.apply(summand, group)
    return total


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, way: Route) -> Tensor:
        ctx.way = way
        me, ranks = way.group.rank(), range(way.group.size())
        parts = [whole[way.rows(me, owner)] for owner in ranks]
        sources = [way.rows(holder, me) for holder in ranks]
        received = exchanged(parts, [len(rows) for rows in sources], way.group)
        return torch.cat(received)[torch.cat(sources).argsort()]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return returned(gradients[0], ctx.way), None


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: Tensor, way: Route) -> Tensor:
        ctx.way = way
        me, ranks = way.group.rank(), range(way.group.size())
        at = torch.full_like(way.owners, -1)
        at[way.owned()] = torch.arange(len(owned), device=owned.device)
        parts = [owned[at[way.rows(holder, me)]] for holder in ranks]
        origins = [way.rows(me, owner) for owner in ranks]
        received = exchanged(parts, [len(rows) for rows in origins], way.group)
        held = torch.cat(received)[torch.cat(origins).argsort()]
        return gathered(held, 0, way.held())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sent(gradients[0], ctx.way), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        flat = whole.reshape(-1)
        split = chunked(len(flat), group, flat.device)
        sizes = [len(places) for places in split.places]
        received = exchanged([flat[split.own]] * group.size(), sizes, group)
        return torch.cat(received).reshape(whole.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return collected(gradients[0], ctx.group), None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        flat = summand.reshape(-1)
        split = chunked(len(flat), group, flat.device)
        parts = [flat[places] for places in split.places]
        received = exchanged(parts, [len(split.own)] * group.size(), group)
        return gathered(torch.stack(received).sum(0), 0, split).reshape(summand.shape).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return spread(gradients[0], ctx.group), None


def exchanged(
    parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send `parts[r]` to rank r and return what every rank sent. All-to-all.

    Args:
        parts: By rank, [rows, ...]; only the number of rows differs.
        sizes: Rows that come from every rank.
        group: The ranks.
    """
    rest = parts[0].shape[1:]
    sent_rows = torch.cat(list(parts)).contiguous()
    received = sent_rows.new_empty(sum(sizes), *rest)
    dist.all_to_all_single(
        received, sent_rows, list(sizes), [len(part) for part in parts], group=group
    )
    return list(received.split(list(sizes)))
