"""Causes in how a loss is averaged: unequal denominators, losses that couple samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from spmd_verify.causes.denominators import denominators
from spmd_verify.causes.exhibit import Exhibit, Piece
from spmd_verify.causes.forward import affected, sample_axes
from spmd_verify.causes.gradients import counted, factor_of, spread
from spmd_verify.causes.words import cause, listed, meaning, names_of, number
from spmd_verify.layouts import Coordinate
from spmd_verify.record import Cause, Row


def mean_of_means(exhibit: Exhibit, row: Row) -> Cause | None:
    """`mean_of_means`: per-rank means averaged although their denominators differ."""
    return _equal_weights(exhibit, row, exhibit.pieces, exhibit.weights, "rank")


def mean_of_sample_means(exhibit: Exhibit, row: Row) -> Cause | None:
    """`mean_of_means`: the mean is taken per sample first, though samples count unequally."""
    pieces = exhibit.samples
    weights = exhibit.weights_of(pieces) if len(pieces) > 1 else None
    return _equal_weights(exhibit, row, pieces, weights, "sample")


def _equal_weights(
    exhibit: Exhibit,
    row: Row,
    pieces: Sequence[Piece],
    weights: Sequence[float] | None,
    unit: str,
) -> Cause | None:
    """Say that pieces count alike in the candidate though they should not."""
    if weights is None or len(weights) < 2 or spread(weights) < 1e-6:
        return None
    scale = 1.0
    if row.stage == "loss":
        if not _is_mean_of_losses(exhibit, row, pieces, unit):
            return None
    else:
        shares = counted(exhibit, row, pieces)
        if shares is None or spread(shares) > 1e-3 * max(map(abs, shares)):
            return None
        scale = shares[0] * len(weights)
    return _means_cause(exhibit, row, pieces, weights, scale, unit)


def _is_mean_of_losses(exhibit: Exhibit, row: Row, pieces: Sequence[Piece], unit: str) -> bool:
    """Say whether the loss is each rank's own mean over its pieces, or the plain mean of all."""
    own: dict[Coordinate, list[float]] = {}
    for piece in pieces:
        value = _loss(piece.record)
        if value is None:
            return False
        own.setdefault(piece.coordinate, []).append(value)
    if unit == "sample":
        own = _by_rank(exhibit, pieces)
    everything = [_loss(piece.record) or 0.0 for piece in pieces]
    # A piece without valid labels is 0 / 0 on one device; a style may make it 0.
    mean = math.fsum(v for v in everything if v == v) / len(everything)
    values = {at: float(v.reshape(-1)[0]) for at, v in exhibit.locals(row).items()}
    tolerance = 4.0 * exhibit.tolerance(row)
    is_own = all(
        any(_same(value, math.fsum(v) / len(v), tolerance) for v in own.values() if v)
        for value in values.values()
    )
    return is_own or all(abs(value - mean) <= tolerance for value in values.values())


def _by_rank(exhibit: Exhibit, samples: Sequence[Piece]) -> dict[Coordinate, list[float]]:
    """Return the losses of the samples that each rank has."""
    found: dict[Coordinate, list[float]] = {}
    for at in exhibit.distinct_parts:
        rows = exhibit.seen.samples(at)
        found[at] = [_loss(samples[i].record) or 0.0 for i in rows if i < len(samples)]
    return found


def _same(value: float, own: float, tolerance: float) -> bool:
    """Say whether two losses agree; of one over nothing NaN and 0 do."""
    if math.isnan(own):
        return math.isnan(value) or value == 0.0
    return abs(value - own) <= tolerance


def _loss(record: Mapping[str, Mapping[str, Tensor]]) -> float | None:
    """Return the loss of a part's record."""
    value = next(iter(record.get("loss", {}).values()), None)
    return None if value is None else float(value)


def _means_cause(
    exhibit: Exhibit,
    row: Row,
    pieces: Sequence[Piece],
    weights: Sequence[float],
    scale: float,
    unit: str,
) -> Cause | None:
    """Return the cause with the denominators of all pieces; None where they are no counts."""
    counts = denominators(exhibit, pieces, weights)
    if counts is None:
        return None
    names = names_of(exhibit.mismatches("gradients"))
    labels = [f"rank {exhibit.rank_of(piece.coordinate)}" for piece in pieces]
    if unit == "sample":
        labels = [f"sample {i}" for i in range(len(pieces))]
    shown = ", ".join(f"{label}: {n:g}" for label, n in zip(labels, counts, strict=True))
    plain = " and ".join(f"{n:g}" for n in counts)
    total = math.fsum(counts)
    due = ", ".join(f"{n:g}/{total:g}" for n in counts)
    times = "" if abs(scale - 1.0) < 1e-3 else f" (times {number(scale)})"
    text = (
        f"mean of per-{unit} means over unequal denominators{times}: {unit} denominators {plain} "
        f"({shown}{_by_axis(exhibit, pieces, counts)}); the reference divides by {total:g}, equal "
        f"weights 1/{len(weights)} are used instead of {due}; "
        f"affected: {listed(names)}"
    )
    return cause(
        "mean_of_means",
        text,
        tensors=list(dict.fromkeys([row.name, *names])),
        ranks=row.ranks,
        remedy="Sum the losses and divide by the denominator of the global batch",
    )


def _by_axis(exhibit: Exhibit, pieces: Sequence[Piece], counts: Sequence[float]) -> str:
    """Return the denominators added up by the index on every axis where these differ."""
    said = []
    for at, axis in enumerate(exhibit.axes):
        sums: dict[int, float] = {}
        for piece, n in zip(pieces, counts, strict=True):
            index = piece.coordinate[at]
            sums[index] = sums.get(index, 0.0) + n
        if len(exhibit.wide_axes) > 1 and len(set(sums.values())) > 1:
            said.append(f"; over {axis}: {', '.join(f'{n:g}' for n in sums.values())}")
    return "".join(said) or f"; over {', '.join(exhibit.wide_axes)}"


def own_denominators(exhibit: Exhibit, row: Row) -> Cause | None:
    """`mean_of_means`: ranks divide the whole sum by their own share of the denominator."""
    if exhibit.reference(row).numel() != 1 or not exhibit.copies_differ(row):
        return None
    held, whole = exhibit.locals(row), float(exhibit.reference(row).reshape(-1)[0])
    if not whole:
        return None
    ratios = {exhibit.rank_of(at): float(v.reshape(-1)[0]) / whole for at, v in held.items()}
    if min(ratios.values()) <= 1.0:
        return None
    if abs(math.fsum(1.0 / k for k in ratios.values()) - 1.0) > 1e-5:
        return None
    shown = ", ".join(f"rank {rank}: {number(k)} x" for rank, k in sorted(ratios.items()))
    text = (
        f"{row.name} is another multiple of the reference on each rank ({shown}), and the inverses "
        f"add up to 1: each rank divides the sum over all by a denominator it has counted alone"
    )
    tensors = [row.name, *affected(exhibit)]
    return cause("mean_of_means", text, tensors=tensors, ranks=row.ranks,
                 remedy="Sum the denominators over the ranks, too")  # fmt: skip


def factor_of_mean(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: the ranks' own losses have k times the reference's mean, and so has a gradient."""
    if exhibit.reference(row).numel() != 1 or not exhibit.copies_differ(row):
        return None
    whole = float(exhibit.reference(row).reshape(-1)[0])
    values = [float(v.reshape(-1)[0]) for v in exhibit.locals(row).values()]
    if not whole:
        return None
    k = math.fsum(values) / len(values) / whole
    known = (factor_of(exhibit, r) for r in exhibit.mismatches("gradients"))
    found = next((each for each in known if each is not None), None)
    if found is None or abs(k - found.k) > 1e-4 * abs(found.k):
        return None
    said, axis = meaning(k, 1e-5, exhibit.axes)
    text = f"{row.name} is {number(k)} x the reference as the mean over ranks, as gradients are" + (
        f": {said}" if said else ""
    )
    tensors = [row.name, *affected(exhibit)]
    return cause("factor", text, factor=k, axis=axis, tensors=tensors, ranks=row.ranks)


def cross_sample(exhibit: Exhibit, row: Row) -> Cause | None:
    """`cross_sample`: the mean of per-rank losses of a loss that couples samples."""
    weights = exhibit.weights
    if len(exhibit.distinct_parts) < 2 or exhibit.is_chance_open or not _is_split_by_data(exhibit):
        return None
    if weights is not None and denominators(exhibit, exhibit.pieces, weights) is not None:
        return None
    if row.stage == "loss":
        own = [_loss(exhibit.part_records[at]) for at in exhibit.distinct_parts]
        values = {at: float(v.reshape(-1)[0]) for at, v in exhibit.locals(row).items()}
        tolerance = 4.0 * exhibit.tolerance(row)
        if any(value is None for value in own):
            return None
        mean = math.fsum(v for v in own if v is not None) / len(own)
        records = exhibit.part_records
        fits = all(
            abs(value - mean) <= tolerance
            or (at in records and abs(value - (_loss(records[at]) or math.nan)) <= tolerance)
            for at, value in values.items()
        )
    else:
        shares = counted(exhibit, row)
        fits = shares is not None and spread(shares) <= 1e-3 * max(map(abs, shares))
    if not fits:
        return None
    names = [row.name, *affected(exhibit)]
    over = ", ".join(sample_axes(exhibit))
    text = (
        f"each rank's loss sees only its own samples: the mean of the per-rank losses over "
        f"{over} is not the loss of the whole batch, which couples samples"
    )
    return cause(
        "cross_sample",
        text,
        tensors=list(dict.fromkeys(names)),
        ranks=row.ranks,
        remedy="Gather the samples of all ranks, with gradients, before the loss",
    )


def _is_split_by_data(exhibit: Exhibit) -> bool:
    """Say whether ranks have other samples, not other parts of the same ones."""
    axes = list(exhibit.axes)
    first = exhibit.distinct_parts[0]
    data = sample_axes(exhibit)
    return any(
        axis in data and at[i] != first[i]
        for at in exhibit.distinct_parts
        for i, axis in enumerate(axes)
    )
