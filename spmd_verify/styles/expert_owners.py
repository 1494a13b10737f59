"""Which experts each rank owns, and how a dim that counts experts is divided over their owners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_verify.styles.token_exchange import Route, collected, returned, sent, spread


@dataclass(frozen=True)
class Owners:
    """Which experts each rank owns: the rule of torch.chunk.

    Attributes:
        count: Experts of all ranks.
        group: The ranks.
    """

    count: int
    group: dist.ProcessGroup

    @property
    def per_rank(self) -> int:
        """Return the experts of a rank that is not among the last."""
        return -(-self.count // self.group.size())

    def range(self, rank: int | None = None) -> tuple[int, int]:
        """Return the first expert of a rank, and one past its last; this rank by default."""
        at = self.group.rank() if rank is None else rank
        return min(at * self.per_rank, self.count), min((at + 1) * self.per_rank, self.count)


def arrived(whole: Tensor, dim: int | None, owners: Owners) -> Tensor:
    """Return what this rank's experts get of a tensor, whose dim counts experts or which all get.

    Rows are (expert, token); a rank holds the tokens of its chunk.
    """
    if dim is None:
        return spread(whole, owners.group)
    moved = whole.movedim(dim, 0)
    flat = moved.reshape(len(moved), -1)
    way = _grid(flat.shape[1], owners, whole.device)
    begin, end = owners.range()
    own = sent(flat.reshape(-1), way)
    return own.reshape(end - begin, *moved.shape[1:]).movedim(0, dim)


def gone_back(part: Tensor, dim: int | None, owners: Owners) -> Tensor:
    """Return the results whole: joined along the experts' dim, or summed over the ranks."""
    if dim is None:
        return collected(part, owners.group)
    moved = part.movedim(dim, 0)
    rest = moved.shape[1:]
    way = _grid(rest.numel(), owners, part.device)
    whole = returned(moved.reshape(-1), way)
    return whole.reshape(owners.count, *rest).movedim(0, dim)


def _grid(tokens: int, owners: Owners, device: torch.device) -> Route:
    """Return the route of (expert, token): held by the token's rank, owned by the expert's."""
    experts = torch.arange(owners.count, device=device) // owners.per_rank
    per_rank = max(1, -(-tokens // owners.group.size()))
    holders = torch.arange(tokens, device=device) // per_rank
    grid = experts[:, None].expand(-1, tokens), holders[None, :].expand(len(experts), -1)
    return Route(owners.group, grid[1].reshape(-1), grid[0].reshape(-1))
