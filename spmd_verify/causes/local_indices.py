"""Indices that count within a rank's part where they should count within the whole: `position`.

Tested by doing so on one device: ranges that start again in every part, and shards of a sequence
that are each taken for a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from spmd_verify.causes.exhibit import Exhibit, fit
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
    parts = exhibit.distinct_parts
    if not axes or len(parts) < 2 or exhibit.weights is not None:
        return None
    rows = exhibit.stage_rows("gradients")
    found, columns = [], [list[Tensor]() for _ in parts]
    for each in rows:
        value = exhibit.assembled(each)
        if value is None or exhibit.copies_differ(each):
            return None
        found.append(value.reshape(-1))
        for column, at in zip(columns, parts, strict=True):
            own = exhibit.part_records[at]["gradients"].get(each.name)
            column.append(torch.zeros_like(found[-1]) if own is None
                          else as_real(own).to(torch.float64).reshape(-1))  # fmt: skip
    whole = torch.cat(found)
    noise = math.sqrt(sum((4.0 * exhibit.tolerance(each)) ** 2 for each in rows))
    if whole.numel() < 4 * len(parts) or not bool(whole.any()):
        return None
    weights = fit([torch.cat(column) for column in columns], whole, noise / float(whole.norm()))
    if weights is None or not _is_loss(exhibit, row, weights):
        return None
    over = ", ".join(axes)
    shown = ", ".join(
        f"rank {exhibit.rank_of(at)} {number(weight)} x"
        for at, weight in zip(parts, weights, strict=True)
    )
    text = (
        f"{row.name} and gradients are the sum of what the shards of {over} give as if each were a "
        f"whole sequence ({shown}): labels, positions or masks are made within the shard, and what "
        f"crosses its border is lost"
    )
    tensors = [row.name, *affected(exhibit)]
    return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axes[0])


def _is_loss(exhibit: Exhibit, row: Row, weights: list[float]) -> bool:
    """Say whether the parts' losses, weighted as gradients are, make the loss that ranks report."""
    own = [next(iter(exhibit.part_records[at]["loss"].values()), None)
           for at in exhibit.distinct_parts]  # fmt: skip
    if any(value is None for value in own):
        return False
    due = math.fsum(w * float(v) for w, v in zip(weights, own, strict=True) if v is not None)
    values = [float(local.reshape(-1)[0]) for local in exhibit.locals(row).values()]
    mean = math.fsum(values) / max(len(values), 1)
    # Summands of it are reported as they are: then their sum is the loss.
    tolerance = 4.0 * exhibit.tolerance(row)
    return any(abs(value - due) <= tolerance for value in (mean, math.fsum(values)))
