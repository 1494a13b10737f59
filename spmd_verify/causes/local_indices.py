"""Indices that count within a rank's part where they should count within the whole: `position`.

Tested by doing so on one device: ranges that start again in every part, and shards of a sequence
that are each taken for a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify.causes.exhibit import Exhibit, Piece, fit
from spmd_verify.causes.forward import affected, sample_axes
from spmd_verify.causes.interventions import (
    CountingLocally,
    are_gradients_held,
    is_held,
    is_loss_held,
)
from spmd_verify.causes.part_runs import Intervention
from spmd_verify.causes.words import cause, number
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row

# Lengths of ranges that are tried.
_MOST_LENGTHS: Final = 6


def counted_from_zero(exhibit: Exhibit, row: Row) -> Cause | None:
    """`position`: what one device gives where `torch.arange` starts again in every part."""
    if exhibit.is_chance_open:
        return None
    for axis in exhibit.wide_axes:
        ranks = exhibit.axes[axis]
        plain = CountingLocally(ranks)
        if exhibit.runs.record(exhibit.batch, within=_entered(plain)) is None:
            return None
        for length in sorted(plain.lengths)[:_MOST_LENGTHS]:
            within = _entered(CountingLocally(ranks, length))
            record = exhibit.runs.record(exhibit.batch, within=within)
            if record is None:
                continue
            if row.stage == "loss":
                is_it = is_loss_held(exhibit, row, record) and are_gradients_held(exhibit, record)
            else:
                is_it = is_held(exhibit, row, record)
            if not is_it:
                continue
            part = length // ranks
            text = (
                f"{row.name} is what one device gives where the range of {length} indices (labels, "
                f"positions) starts again at 0 in each of {ranks} parts of {part}: the ranks of "
                f"{axis} count from 0, the offset of rank x {part} is missing"
            )
            tensors = [row.name, *affected(exhibit)]
            return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _entered(mode: CountingLocally) -> Intervention:
    """Return what runs a step under a mode."""

    @contextmanager
    def within(_model: nn.Module) -> Iterator[None]:
        with mode:
            yield

    return within


def shards_as_sequences(exhibit: Exhibit, row: Row) -> Cause | None:
    """`position`: loss and gradients are a weighted sum of those of shards taken for wholes."""
    data = sample_axes(exhibit)
    axes = [axis for axis in exhibit.wide_axes if axis not in data]
    rows = exhibit.stage_rows("gradients")
    values = [exhibit.assembled(each) for each in rows]
    if not axes or any(value is None for value in values):
        return None
    if any(exhibit.copies_differ(each) for each in rows):
        return None
    whole = torch.cat([value.reshape(-1) for value in values if value is not None])
    noise = math.sqrt(sum((4.0 * exhibit.tolerance(each)) ** 2 for each in rows))
    for axis, shards in _shards(exhibit, axes, data):
        if whole.numel() < 4 * len(shards) or exhibit.weights_of(shards) is not None:
            continue
        columns = [torch.cat([_own(shard, each) for each in rows]) for shard in shards]
        weights = fit(columns, whole, noise / max(float(whole.norm()), 1e-300))
        if weights is None or not _is_loss(exhibit, row, shards, weights):
            continue
        shown = ", ".join(f"{number(weight)} x" for weight in weights)
        text = (
            f"{row.name} and gradients are the sum of what the shards of {axis} give as if each "
            f"were a whole sequence ({shown}): labels, positions or masks are made within the "
            f"shard, and what crosses its border is lost"
        )
        tensors = [row.name, *affected(exhibit)]
        return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _shards(
    exhibit: Exhibit, axes: list[str], data: list[str]
) -> Iterator[tuple[str, list[Piece]]]:
    """Give what each shard of the sequences gives alone, by axis: as seen, else as cut evenly."""
    seen = [
        Piece(at, 0, exhibit.part_batches[at], exhibit.part_records[at])
        for at in exhibit.distinct_parts
    ]
    if len(seen) > 1:
        yield axes[0], seen
    groups = math.prod(exhibit.axes[axis] for axis in data)
    for axis in axes:
        for dim in range(1, 3):
            found: list[Piece] = []
            for batch in _cut(exhibit.batch, groups, exhibit.axes[axis], dim):
                record = exhibit.runs.record(batch)
                if record is None:
                    break
                found.append(Piece((), len(found), batch, record))
            else:
                if len(found) > 1:
                    yield axis, found


def _cut(batch: Any, groups: int, ranks: int, dim: int) -> list[Any]:
    """Return a batch in equal groups of samples, each cut along another dim; empty if it cannot."""
    leaves, structure = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > dim]
    sizes = {(leaf.shape[0], leaf.shape[dim]) for leaf in tensors}
    if len(sizes) != 1 or any(size % n for size, n in zip(*sizes, (groups, ranks), strict=True)):
        return []
    found = []
    for group in range(groups):
        for rank in range(ranks):
            cut = [
                leaf.chunk(groups)[group].chunk(ranks, dim)[rank]
                if isinstance(leaf, Tensor) and leaf.ndim > dim
                else leaf
                for leaf in leaves
            ]
            found.append(structure.unflatten(cut))
    return found


def _own(shard: Piece, row: Row) -> Tensor:
    """Return a gradient of a shard as a vector, zeros where it has none."""
    own = shard.record["gradients"].get(row.name)
    if own is None:
        return torch.zeros(math.prod(row.shape), dtype=torch.float64)
    return as_real(own).to(torch.float64).reshape(-1)


def _is_loss(exhibit: Exhibit, row: Row, shards: list[Piece], weights: list[float]) -> bool:
    """Say whether the parts' losses, weighted as gradients are, make the loss that ranks report."""
    own = [next(iter(shard.record["loss"].values()), None) for shard in shards]
    if any(value is None for value in own):
        return False
    due = math.fsum(w * float(v) for w, v in zip(weights, own, strict=True) if v is not None)
    values = [float(local.reshape(-1)[0]) for local in exhibit.locals(row).values()]
    mean = math.fsum(values) / max(len(values), 1)
    # Summands of it may be reported as they are: then their sum is the loss.
    tolerance = 4.0 * exhibit.tolerance(row)
    return any(abs(value - due) <= tolerance for value in (mean, math.fsum(values)))
