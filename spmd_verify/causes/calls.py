"""Causes in the calls of a schedule: what each of them does to gradients that were there before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import counted, factor_of
from spmd_verify.causes.words import cause, listed, names_of, number, rows_text
from spmd_verify.record import Cause, Row

# Ratios are read off gradients that carry noise; two of them are one value within this.
_ALIKE = 1e-3


def rescaled(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: each call of a schedule divides the gradients that earlier ones left, too."""
    pieces = exhibit.pieces
    if len(pieces) > 2 and _same(pieces[0].batch, pieces[1].batch):
        pieces = pieces[1:]  # the stage tried its forward first, to learn shapes
    if len(pieces) < 4 or len({piece.coordinate for piece in pieces}) > 1:
        return None
    weights, shares = exhibit.weights_of(pieces), counted(exhibit, row, pieces)
    if weights is None or shares is None or not all(weights):
        return None
    ratios = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for calls, micro in _calls(len(pieces)):
        if not _is_rescaled(ratios, calls, micro):
            continue
        ranges = [rows_text(range(i * micro, (i + 1) * micro)) for i in range(calls)]
        told = ", ".join(f"{where} {ratios[i * micro]:.4f} x" for i, where in enumerate(ranges))
        text = f"the micro-batches of {{names}} count: {told}; {_why(calls, micro)}"
        return _cause(exhibit, row, text, math.fsum(ratios) / len(ratios))
    return None


def rescaled_alike(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: the same where all micro-batches are alike, so that only the mean shows."""
    found = factor_of(exhibit, row)
    forwards = max((exhibit.seen.calls(at) for at in exhibit.dump.ranks), default=0)
    if found is None:
        return None
    # One forward may be the stage's own, to learn shapes.
    for calls, micro in [*_calls(forwards), *_calls(forwards - 1)]:
        mean = math.fsum(micro**-i for i in range(calls)) / calls
        if abs(found.k / mean - 1.0) <= found.noise:
            sum_of = " + ".join(["1", *(f"1/{micro**i}" for i in range(1, calls))])
            text = (
                f"{{names}}: {number(found.k)} x the reference: ({sum_of}) / {calls}; "
                f"{_why(calls, micro)}"
            )
            return _cause(exhibit, row, text, found.k)
    return None


def _same(first: Any, second: Any) -> bool:
    """Say whether two batches hold the same values."""
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


def _calls(count: int) -> Iterator[tuple[int, int]]:
    """Give the ways to make `count` micro-batches in several calls of several each."""
    return ((n, count // n) for n in range(2, count // 2 + 1) if count % n == 0)


def _is_rescaled(ratios: Sequence[float], calls: int, micro: int) -> bool:
    """Say whether micro-batches of one call count alike, and 1/micro of those of the next."""
    groups = [ratios[i * micro : (i + 1) * micro] for i in range(calls)]
    is_even = all(max(group) - min(group) <= _ALIKE * abs(group[0]) for group in groups)
    steps = itertools.pairwise(groups)
    return is_even and all(abs(a[0] * micro - b[0]) <= _ALIKE * abs(b[0]) for a, b in steps)


def _why(calls: int, micro: int) -> str:
    """Say what happens in each call."""
    return (
        f"each of the {calls} calls of the schedule divides all that .grad holds by its {micro} "
        f"micro-batches, what earlier calls left too"
    )


def _cause(exhibit: Exhibit, row: Row, text: str, factor: float) -> Cause:
    """Return the cause for all gradients that differ."""
    names = names_of(exhibit.mismatches(row.stage))
    return cause(
        "factor",
        text.format(names=listed(names)),
        tensors=names,
        factor=factor,
        ranks=row.ranks,
        remedy="Let the schedule not scale gradients, and divide once after the last call",
    )
