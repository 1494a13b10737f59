"""What the parts of a batch are averaged over: valid tokens, samples, sums of a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.causes.exhibit import Exhibit, Piece

_NLL = ("nll_loss_forward", "nll_loss2d_forward")


class _Divisors(TorchDispatchMode):
    """Collects what scalars are divided by: weights of nll_loss, 0-dim divisors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _NLL:
            self.found.append(float(result[1]))
        elif name == "div" and isinstance(result, Tensor) and result.ndim == 0:
            divisor = args[1]
            self.found.append(float(divisor))
        elif name == "mean" and isinstance(args[0], Tensor) and result.ndim == 0:
            self.found.append(float(args[0].numel()))
        return result


def denominators(
    exhibit: Exhibit, pieces: Sequence[Piece], weights: Sequence[float]
) -> list[float] | None:
    """Return each piece's denominator: what its step divides by, where that is in proportion.

    Args:
        exhibit: The cell.
        pieces: Parts of the batch.
        weights: How much each piece counts in the reference.

    Returns:
        None where the weights are no shares of a count: then something else couples the pieces.
    """
    if abs(math.fsum(weights) - 1.0) > 1e-4 or min(weights) < -1e-6:
        return None
    seen = [_divisors(exhibit, piece) for piece in pieces]
    if len({len(each) for each in seen}) == 1:
        for candidate in zip(*seen, strict=True):
            total = math.fsum(candidate)
            if total > 0.0 and all(
                abs(n / total - w) < 1e-4 for n, w in zip(candidate, weights, strict=True)
            ):
                return list(candidate)
    ratios = [Fraction(max(w, 0.0)).limit_denominator(4096) for w in weights]
    common = math.lcm(*(ratio.denominator for ratio in ratios))
    return None if common > _most(exhibit.batch) else [float(ratio * common) for ratio in ratios]


def _most(batch: Any) -> int:
    """Return the largest count a batch can be divided by: elements of its largest input."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max((leaf.numel() for leaf in leaves), default=1)


def _divisors(exhibit: Exhibit, piece: Piece) -> list[float]:
    """Return the divisors of one piece's step."""
    with _Divisors() as divisors, torch.enable_grad():
        exhibit.runs.record(piece.batch)
    return divisors.found
