"""Ring attention: queries stay, blocks of keys and values travel around the ranks.

A rank has the queries, keys and values of its own positions. In each hop it attends to the block
at hand and passes it on; blocks are merged by their share of the softmax. Backward sends each
block around once more together with its gradient, which arrives home complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmd_verify.styles.sequence import Split


@dataclass(frozen=True)
class Ring:
    """Who has which positions, and what every query may see.

    Attributes:
        queries: Positions of the queries by rank.
        keys: Positions of keys and values by rank.
        is_causal: A query at position i sees keys at positions <= i.
        scale: Factor of the scores.
    """

    queries: Split
    keys: Split
    is_causal: bool
    scale: float

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks."""
        return self.keys.group

    def source(self, hop: int) -> int:
        """Return whose block is here after `hop` hops."""
        return (self.group.rank() - hop) % self.group.size()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    mask: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the attention of this rank's queries over all keys.

    Args:
        query: [..., queries, width], of this rank's positions.
        key: [..., keys, width], likewise; the same leading sizes.
        value: [..., keys, value width].
        ring: The ranks and what is seen.
        mask: Added to the scores: [..., queries, all keys], leading sizes may broadcast.
        kept: Factors of the shares after the softmax (dropout), as large.

    Returns:
        [..., queries, value width]; zeros for a query that sees no key, as torch gives.
    """
    out: Tensor = _RingAttention.apply(query, key, value, mask, kept, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - one entry per differentiable input
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kept: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        merged = Merged(query, value)
        block = torch.cat([_precise(key), _precise(value)], -1)
        for hop in range(ring.group.size()):
            source = ring.source(hop)
            key_block, value_block = block.split([key.shape[-1], value.shape[-1]], -1)
            scores = _scores(_precise(query), key_block, mask, ring, source)
            merged.add(scores, value_block, _columns(kept, ring, source))
            if hop + 1 < ring.group.size():
                block = _passed_on(block, ring, hop)
        out = merged.result().to(query.dtype)
        ctx.ring, ctx.has_mask, ctx.has_kept = ring, mask is not None, kept is not None
        optional = [tensor for tensor in (mask, kept) if tensor is not None]
        ctx.save_for_backward(query, key, value, out, merged.log_sum(), *optional)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, *optional = ctx.saved_tensors
        mask = optional.pop(0) if ctx.has_mask else None
        kept = optional.pop(0) if ctx.has_kept else None
        ring: Ring = ctx.ring
        gradient, queries = _precise(gradients[0]), _precise(query)
        inner = (gradient * _precise(out)).sum(-1, keepdim=True)
        sizes = [key.shape[-1], value.shape[-1]] * 2
        block = torch.cat([_precise(key), _precise(value)], -1)
        block = torch.cat([block, torch.zeros_like(block)], -1)
        of_query = torch.zeros_like(queries)
        of_mask = None if mask is None else torch.zeros_like(_precise(mask))
        for hop in range(ring.group.size()):
            source = ring.source(hop)
            key_block, value_block, of_key, of_value = block.split(sizes, -1)
            shares = (_scores(queries, key_block, mask, ring, source) - log_sum).exp()
            factors = _columns(kept, ring, source)
            of_shares = gradient @ value_block.mT
            used = shares
            if factors is not None:
                used, of_shares = shares * factors, of_shares * factors
            of_scores = shares * (of_shares - inner)
            of_query += of_scores @ key_block * ring.scale
            if of_mask is not None:
                columns = ring.keys.places[source]
                of_mask[..., columns] = of_scores.sum_to_size(of_mask[..., columns].shape)
            moved = (of_scores.mT @ queries * ring.scale, used.mT @ gradient)
            block = torch.cat([key_block, value_block, of_key + moved[0], of_value + moved[1]], -1)
            block = _passed_on(block, ring, hop)  # after the last hop it is home
        _, _, of_key, of_value = block.split(sizes, -1)
        of_mask = None if of_mask is None or mask is None else of_mask.to(mask.dtype)
        found = (of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype))
        return *found, of_mask, None, None


class Merged:
    """What has been attended to so far: an online softmax over blocks of keys."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        """Begin with nothing seen: query [..., queries, width], value [..., keys, width]."""
        precise = _precise(query)
        rows = query.shape[:-1]
        self._total = precise.new_zeros(*rows, value.shape[-1])
        self._weight = precise.new_zeros(*rows, 1)
        self._top = precise.new_full((*rows, 1), -math.inf)

    def add(self, scores: Tensor, values: Tensor, factors: Tensor | None) -> None:
        """Fold one block in: scores [..., queries, keys], values [..., keys, value width]."""
        if not scores.shape[-1]:
            return
        top = torch.maximum(self._top, scores.amax(-1, keepdim=True))
        base = top.masked_fill(top == -math.inf, 0.0)  # nothing seen yet: exp(-inf - 0) is 0
        shares, shrunk = (scores - base).exp(), (self._top - base).exp()
        self._weight = self._weight * shrunk + shares.sum(-1, keepdim=True)
        used = shares if factors is None else shares * factors
        self._total = self._total * shrunk + used @ values
        self._top = top

    def result(self) -> Tensor:
        """Return the output [..., queries, value width]."""
        return self._total / self._weight.masked_fill(self._weight == 0, 1.0)

    def log_sum(self) -> Tensor:
        """Return the logarithm of the softmax's denominator [..., queries, 1], 0 for no key."""
        is_blind = self._weight == 0
        top = self._top.masked_fill(is_blind, 0.0)
        return top + self._weight.masked_fill(is_blind, 1.0).log()


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, ring: Ring, source: int) -> Tensor:
    """Return the scores of a block, [..., queries, keys]; -inf where nothing is seen."""
    scores = query @ key.mT * ring.scale
    if ring.is_causal:
        later = ring.keys.places[source] > ring.queries.own[:, None]
        scores = scores.masked_fill(later, -math.inf)
    columns = _columns(mask, ring, source)
    return scores if columns is None else scores + columns


def _columns(rows: Tensor | None, ring: Ring, source: int) -> Tensor | None:
    """Return the columns of a block from what this rank's rows have of all keys."""
    return None if rows is None else rows[..., ring.keys.places[source]]


def _passed_on(block: Tensor, ring: Ring, hop: int) -> Tensor:
    """Send the block at hand to the next rank and take the previous rank's. Blocks may be empty.

    Args:
        block: [..., keys of `ring.source(hop)`, width].
        ring: The ranks.
        hop: How many hops the block has made.
    """
    group, rank, ranks = ring.group, ring.group.rank(), ring.group.size()
    if ranks == 1:
        return block
    rows = len(ring.keys.places[ring.source(hop + 1)])
    received = block.new_empty(*block.shape[:-2], rows, block.shape[-1])
    sent = block.contiguous()
    works = []
    if sent.numel():
        to = dist.get_global_rank(group, (rank + 1) % ranks)
        works.append(dist.isend(sent, to, group=group, tag=hop))
    if received.numel():
        origin = dist.get_global_rank(group, (rank - 1) % ranks)
        works.append(dist.irecv(received, origin, group=group, tag=hop))
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
    return received


def _precise(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of the sums: at least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
