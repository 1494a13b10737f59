"""What a mode decides before the expansion, and what moving a value costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from spmd.layout import Layout, Partial, Placement, Replicate, Shard
from spmd.mesh import MeshShape


@dataclass
class Plan:
    """What a mode decides before the expansion.

    Attributes:
        mesh: Axis names and sizes.
        inputs: Layout of every placeholder, in signature order.
        compute: Position of a placeholder -> layout in which forward and backward see it.
        gradients: Name of a node -> layout its finished gradient is reduced to.
        cuts: Name of a node -> (axis, placement its value is brought to where it stands).
        outputs: Layout of every output; None leaves it as computed, reduced if partial.
        regather: Gather parameters again for backward instead of keeping them.
        strict: Refuse operators without a rule.
        mean: The graph is one rank's own step; gradients are averaged over all ranks.
        local_draws: Every rank draws its own random numbers.
    """

    mesh: MeshShape
    inputs: list[Layout]
    compute: dict[int, Layout] = field(default_factory=dict)
    gradients: dict[str, Layout] = field(default_factory=dict)
    cuts: dict[str, tuple[int, Placement]] = field(default_factory=dict)
    outputs: list[Layout | None] = field(default_factory=list)
    regather: bool = True
    strict: bool = False
    mean: bool = False
    local_draws: bool = False


@dataclass
class Value:
    """A global value, named by its global node, and the local nodes that hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    forms: dict[Layout, fx.Node]
    name: str = ""

    @property
    def bytes(self) -> int:
        """Size of the global value, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def move_cost(size: int, have: Placement, wanted: Placement, num_ranks: int) -> float:
    """Return the bytes each rank moves to bring a value of `size` bytes from one placement
    to another: ring all_gather and reduce_scatter (n-1)/n, all_reduce twice that."""
    if have == wanted:
        return 0.0
    share = size * (num_ranks - 1) / num_ranks
    if isinstance(have, Replicate):
        return 1e-5 * size if isinstance(wanted, Shard) else 2e-5 * size
    if isinstance(have, Shard):
        return share if isinstance(wanted, Replicate) else 2 * share + 1
    if isinstance(wanted, Partial):
        return math.inf
    return 2 * share + 1 if isinstance(wanted, Replicate) else share + 1
