"""Causes of wrong gradients that follow from what each rank's part of the batch gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from spmd_verify.causes.forward import affected
from spmd_verify.causes.words import (
    cause,
    listed,
    meaning,
    names_of,
    number,
    ranks_text,
)
from spmd_verify.denominators import denominators
from spmd_verify.exhibit import Exhibit, Piece, fit, part_of
from spmd_verify.layouts import Coordinate
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row


def part_gradients(
    exhibit: Exhibit, row: Row, pieces: Sequence[Piece] | None = None
) -> list[Tensor]:
    """Return the gradient that each piece of the batch gives alone, global [...]."""
    whole = exhibit.reference(row)
    found = []
    for piece in exhibit.pieces if pieces is None else pieces:
        value = piece.record["gradients"].get(row.name)
        found.append(torch.zeros_like(whole) if value is None else as_real(value).to(torch.float64))
    return found


def part_ranks(exhibit: Exhibit) -> list[int]:
    """Return the first rank of each piece."""
    return [exhibit.rank_of(piece.coordinate) for piece in exhibit.pieces]


def unused(exhibit: Exhibit, row: Row) -> Cause | None:
    """`unused`: a gradient exists on some ranks only, or an unused parameter held others back."""
    held = exhibit.locals(row)
    everyone = set(exhibit.dump.ranks)
    same_part = len(exhibit.regions(row)) <= 1
    without = sorted(exhibit.rank_of(at) for at in everyone - set(held))
    if held and without and same_part:
        text = (
            f"{row.name} has no gradient (None) on {ranks_text(without)}: it is unused there, and "
            f"its reduction never sees those ranks"
        )
        return cause("unused", text, tensors=[row.name], ranks=without)
    if not exhibit.fact("wrappers") or not exhibit.copies_differ(row):
        return None
    known = set(exhibit.store.names(exhibit.step, "gradients"))
    idle = [name for name in exhibit.store.index.trainable if name not in known]
    if not idle or not exhibit.fact("is_entered"):
        return None
    names = names_of(exhibit.mismatches("gradients"))
    text = (
        f"the replicas of {listed(names)} disagree: {listed(idle)} got no gradient, so the bucket "
        f"it shares was never reduced; use find_unused_parameters or leave it out"
    )
    return cause("unused", text, tensors=[*names, *idle], ranks=row.ranks)


def tied(exhibit: Exhibit, row: Row) -> Cause | None:
    """`tied`: the gradient of a tied parameter is only one use's share, or copies differ."""
    if not row.aliases:
        return None
    shares = exhibit.runs.untied_shares(row.name, list(row.aliases))
    if len(shares) < 2:
        return None
    both = " and ".join([row.name, *row.aliases])
    tolerance, whole = 4.0 * exhibit.tolerance(row), exhibit.reference(row)
    for at, local in exhibit.locals(row).items():
        part = exhibit.region(row, at)
        if part is None:
            continue
        columns = [part_of(as_real(share).to(torch.float64), part) for share in shares.values()]
        weights = fit(columns, local, tolerance / max(float(local.norm()), 1e-300))
        if weights is None or all(abs(w - 1.0) < 1e-3 for w in weights):
            continue
        if len({round(w, 4) for w in weights}) == 1:
            continue  # a common factor is no matter of the tie
        counted = ", ".join(f"{use} {number(w)} x" for use, w in zip(shares, weights, strict=True))
        text = (
            f"{both} are tied, yet the gradient on rank {exhibit.rank_of(at)} counts {counted}: "
            f"a share is missing, the copies drift apart"
        )
        return cause("tied", text, tensors=[row.name, *row.aliases], ranks=row.ranks)
    del whole
    return None


def stale(exhibit: Exhibit, row: Row) -> Cause | None:
    """`stale`: the gradient is the previous step's, or still holds it."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or row.step == 0:
        return None
    if exhibit.store.entry(row.step - 1, row.stage, row.name) is None:
        return None
    before = exhibit.reference(row, row.step - 1)
    weights = fit(
        [whole, before], found, 4.0 * exhibit.tolerance(row) / max(float(found.norm()), 1e-300)
    )
    if weights is None or abs(weights[1]) < 1e-3:
        return None
    rows = exhibit.mismatches("gradients")
    what = (
        "is that of the step before"
        if abs(weights[0]) < 1e-3
        else f"still holds {number(weights[1])} x that of the step before (not zeroed)"
    )
    text = f"the gradient of {listed(names_of(rows))} {what}"
    return cause("stale", text, tensors=names_of(rows), ranks=row.ranks)


def factor_of(exhibit: Exhibit, row: Row) -> tuple[float, float] | None:
    """Return `(k, its relative noise)` where the tensor is k times the reference everywhere."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or exhibit.copies_differ(row):
        return None
    power = float(whole.square().sum())
    if not power:
        return None
    k = 1.0 + float(((found - whole) * whole).sum()) / power
    tolerance = exhibit.tolerance(row)
    if float((found - k * whole).norm()) > tolerance * max(1.0, abs(k)):
        return None
    return k, max(4.0 * tolerance / math.sqrt(power), 1e-9)


def uniform_factor(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: `candidate = k x reference`."""
    found = factor_of(exhibit, row)
    if found is None:
        return None
    k, noise = found
    said, axis = meaning(k, noise, exhibit.axes)
    if not said and exhibit.reference(row).numel() == 1:
        return None
    rows = [
        r
        for r in exhibit.mismatches(row.stage)
        if (other := factor_of(exhibit, r)) and abs(other[0] / k - 1.0) < 1e-3
    ]
    names = names_of(rows)
    right = [r.name for r in exhibit.stage_rows(row.stage) if r.name not in names]
    only = " only" if right else ""
    why = f": {said}" if said else ""
    remedy = f" (divide by {axis} once)" if axis and k > 1.0 else ""
    text = f"{listed(names)}{only}: {number(k)} x the reference{why}{remedy}"
    return cause("factor", text, tensors=names, factor=k, axis=axis, ranks=row.ranks)


def own_data(exhibit: Exhibit, row: Row) -> Cause | None:
    """`no_sync`: replicas differ and each is the gradient of its own part of the batch."""
    if not exhibit.copies_differ(row) or len(exhibit.distinct_parts) < 2:
        return None
    if not is_own_data(exhibit, row):
        return None
    rows = [r for r in exhibit.mismatches(row.stage) if is_own_data(exhibit, r)]
    names = names_of([row, *rows])
    axis = next((a for a in exhibit.wide_axes if exhibit.is_data_axis(a)), None)
    wrappers = exhibit.fact("wrappers")
    entered = (
        "" if exhibit.fact("is_entered") else f"; {(wrappers or ['its'])[0]}.forward never ran"
    )
    text = (
        f"the replicas of {listed(names)} disagree: each rank has the gradient of its own data, "
        f"never reduced over {axis or 'the mesh'}{entered}"
    )
    kind = "no_sync" if wrappers else "missing_reduction"
    return cause(kind, text, tensors=names, axis=axis, ranks=row.ranks)


def is_own_data(exhibit: Exhibit, row: Row) -> bool:
    """Say whether every rank's gradient is a multiple of its own part's, all by one factor."""
    factors = []
    for at, local in exhibit.locals(row).items():
        record = exhibit.part_records.get(at)
        value = None if record is None else record["gradients"].get(row.name)
        part = exhibit.region(row, at)
        if value is None or part is None:
            return False
        own = part_of(as_real(value).to(torch.float64), part)
        power = float(own.square().sum())
        if not power:
            continue
        k = float((local * own).sum()) / power
        if float((local - k * own).norm()) > 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
            return False
        factors.append(k)
    return bool(factors) and max(factors) - min(factors) < 1e-3 * abs(factors[0])


def _counted(
    exhibit: Exhibit, row: Row, pieces: Sequence[Piece] | None = None
) -> list[float] | None:
    """Return how each piece's gradient counts in the candidate, None where they do not explain."""
    found = exhibit.assembled(row)
    parts = part_gradients(exhibit, row, pieces)
    if found is None or len(parts) < 2 or exhibit.copies_differ(row):
        return None
    tolerance = 4.0 * exhibit.tolerance(row)
    if found.numel() < 2 * len(parts):
        return _even(found, parts, tolerance)
    return fit(parts, found, tolerance / max(float(found.norm()), 1e-300))


def _even(found: Tensor, parts: Sequence[Tensor], tolerance: float) -> list[float] | None:
    """Return equal weights where they fit: too few numbers would fit any weights."""
    mean = torch.stack(list(parts)).mean(0)
    even = float((found - mean).norm()) <= tolerance
    return [1.0 / len(parts)] * len(parts) if even else None


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
    if weights is None or len(weights) < 2 or _spread(weights) < 1e-6:
        return None
    scale = 1.0
    if row.stage == "loss":
        if not _is_mean_of_losses(exhibit, row, pieces, unit):
            return None
    else:
        counted = _counted(exhibit, row, pieces)
        if counted is None or _spread(counted) > 1e-3 * max(map(abs, counted)):
            return None
        scale = counted[0] * len(weights)
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
    times = "" if abs(scale - 1.0) < 1e-3 else f" (times {number(scale)})"
    text = (
        f"mean of per-{unit} means over unequal denominators{times}: {unit} denominators {plain} "
        f"({shown}{_by_axis(exhibit, pieces, counts)}); the reference divides by {total:g}, equal weights "
        f"1/{len(weights)} are used instead of {', '.join(f'{n:g}/{total:g}' for n in counts)}; "
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


def _spread(values: Sequence[float]) -> float:
    """Return the distance of the largest and the smallest value."""
    return max(values) - min(values)


def weighted_ranks(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor` or `double_reduction`: one part of the batch counts other than it should."""
    weights, counted = exhibit.weights, _counted(exhibit, row)
    if weights is None or counted is None or len(weights) < 2:
        return None
    ratios = [c / w if w else math.inf for c, w in zip(counted, weights, strict=True)]
    usual = _usual(ratios)
    off = [i for i, r in enumerate(ratios) if abs(r - usual) > 1e-3]
    if not off:
        return None
    ranks = [part_ranks(exhibit)[i] for i in off]
    shown = ", ".join(number(ratios[i]) for i in off)
    rows = [r for r in exhibit.mismatches(row.stage) if _same_ratios(exhibit, r, ratios)]
    names = names_of([row, *rows])
    is_double = all(abs(ratios[i] - 2.0) < 1e-3 for i in off)
    kind = "double_reduction" if is_double else "factor"
    what = "counted twice" if is_double else f"counted {shown} x"
    if all(abs(ratios[i]) < 1e-3 for i in off):
        kind, what = "missing_reduction", "not counted at all (0.0 x)"
    text = (
        f"{listed(names)}: the contribution of {ranks_text(ranks)} is {what}, the others "
        f"{number(usual)} x; replicas agree"
    )
    k = ratios[off[0]]
    return cause(kind, text, tensors=names, ranks=ranks, factor=k)


def _usual(ratios: Sequence[float]) -> float:
    """Return how most parts count; 1 where there is no majority and some part counts right."""
    for ratio in ratios:
        if sum(abs(other - ratio) < 1e-3 for other in ratios) * 2 > len(ratios):
            return ratio
    return 1.0 if any(abs(r - 1.0) < 1e-3 for r in ratios) else sorted(ratios)[len(ratios) // 2]


def _same_ratios(exhibit: Exhibit, row: Row, ratios: Sequence[float]) -> bool:
    """Say whether parts count in another tensor as they do in this."""
    found, weights = exhibit.assembled(row), exhibit.weights
    if found is None or weights is None:
        return False
    parts = part_gradients(exhibit, row)
    made = sum(r * w * g for r, w, g in zip(ratios, weights, parts, strict=True))
    scale = max(1.0, *(abs(r) for r in ratios))
    return float((found - made).norm()) <= 8.0 * exhibit.tolerance(row) * scale


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
        counted = _counted(exhibit, row)
        fits = counted is not None and _spread(counted) <= 1e-3 * max(map(abs, counted))
    if not fits:
        return None
    names = [row.name, *affected(exhibit)]
    text = (
        f"each rank's loss sees only its own samples: the mean of the per-rank losses over "
        f"{', '.join(exhibit.wide_axes)} is not the loss of the whole batch, which couples samples"
    )
    operator = exhibit.experiments.get("operator")
    return cause(
        "cross_sample",
        f"{text}{f' ({operator})' if operator else ''}",
        tensors=list(dict.fromkeys(names)),
        ranks=row.ranks,
        remedy="Gather the samples of all ranks, with gradients, before the loss",
    )


def random_stream(exhibit: Exhibit, row: Row) -> Cause | None:
    """`random_stream`: forward is right, the gradient vanishes its difference without chance."""
    if exhibit.experiments.get("no_random") is not True:
        return None
    names = names_of(exhibit.mismatches(row.stage))
    text = (
        f"{listed(names)}: the difference vanishes when nothing random is drawn: backward (a "
        f"recomputation, or another rank) draws other random numbers than forward"
    )
    return cause("random_stream", text, tensors=names, ranks=row.ranks)


def _is_split_by_data(exhibit: Exhibit) -> bool:
    """Say whether ranks have other samples, not other parts of the same ones."""
    axes = list(exhibit.axes)
    first = exhibit.distinct_parts[0]
    return any(
        exhibit.is_data_axis(axis) and at[i] != first[i]
        for at in exhibit.distinct_parts
        for i, axis in enumerate(axes)
    )


def loss_term(exhibit: Exhibit, row: Row) -> Cause | None:
    """`additive`: a term of the loss counts too often or not at all."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or exhibit.copies_differ(row):
        return None
    excess, tolerance = found - whole, 4.0 * exhibit.tolerance(row)
    for term in exhibit.terms:
        gradient = term.gradients.get(row.name)
        if gradient is None or not bool(gradient.any()):
            continue
        own = as_real(gradient).to(torch.float64)
        k = float((excess * own).sum() / own.square().sum())
        if float((excess - k * own).norm()) > tolerance * max(1.0, abs(k)) or abs(k) < 1e-4:
            continue
        if not _all_excess(exhibit, term.gradients, k):
            continue
        ratio = Fraction(k).limit_denominator(64)
        exactly = abs(k - float(ratio)) < 1e-3
        names = names_of(exhibit.mismatches(row.stage))
        text = (
            f"{listed(names)}: the excess is {number(k)} x the gradient of a term of the loss "
            f"({term.name} = {term.value:.6g})"
            + (": the term is missing" if exactly and ratio == -1 else "")
        )
        return cause("additive", text, tensors=names, ranks=row.ranks, factor=k)
    return None


def _all_excess(exhibit: Exhibit, gradients: Mapping[str, Tensor], k: float) -> bool:
    """Say whether one multiple of a term's gradients explains all gradients of the step."""
    for row in exhibit.mismatches("gradients"):
        found = exhibit.assembled(row)
        own = gradients.get(row.name)
        if found is None or own is None:
            return False
        excess = found - exhibit.reference(row) - k * as_real(own).to(torch.float64)
        if float(excess.norm()) > 8.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
            return False
    return True


# -- clipping ---------------------------------------------------------------------------------


def clip_factor(exhibit: Exhibit) -> float | None:
    """Return the factor by which the reference's own step shrinks all gradients, if it does.

    Seen where the step clips by hand: autograd's gradients and those the optimizer gets
    differ by one factor below 1.
    """
    torchs = exhibit.store.entry(exhibit.step, "clipping", "clip_factor")
    if torchs is not None:
        # The candidate's gradients are read after a clipping of its own where it shows none.
        is_shown = any(exhibit.locals(r) for r in exhibit.stage_rows("clipping"))
        return None if is_shown or torchs.value is None else torchs.value
    raw = exhibit.raw_gradients
    factors = []
    for name in exhibit.store.names(exhibit.step, "gradients"):
        value = raw.get(name)
        if value is None or not bool(value.any()):
            continue
        right = exhibit.store.exact(exhibit.run, exhibit.step, "gradients", name).to(torch.float64)
        k = float((right * value).sum() / value.square().sum())
        if float((right - k * value).norm()) > 1e-6 * float(right.norm()):
            return None
        factors.append(k)
    if not factors or _spread(factors) > 1e-6 or not factors[0] < 1.0 - 1e-9:
        return None
    return factors[0]


def clipped(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: the reference clips by hand, and the candidate's factor is another."""
    right = clip_factor(exhibit)
    if right is None:
        return None
    rows = exhibit.mismatches("gradients")
    names = names_of(rows)
    found = [factor_of(exhibit, r) for r in rows]
    # Rows are judged against torch's unclipped gradients where the reference clips by torch.
    shift = right if exhibit.store.entry(exhibit.step, "clipping", "clip_factor") else 1.0
    if all(each is not None for each in found):
        factors = [each[0] / shift for each in found if each is not None]
        if _spread(factors) <= 1e-3 * abs(factors[0]):
            k = factors[0]
            said, axis = meaning(1.0 / k, 1e-4, exhibit.axes)
            text = (
                f"{listed(names)}: right before clipping, {number(k)} x the reference after it: "
                f"the norm that clips is {number(1.0 / k)} x the right one"
                + (f" = {said}" if said else "")
            )
            return cause("norm_clip", text, tensors=names, factor=k, axis=axis, ranks=row.ranks)
    by_rank = _rank_factors(exhibit, row)
    if by_rank is not None:
        shown = ", ".join(f"rank {r}: {number(k / shift)} x" for r, k in by_rank.items())
        text = (
            f"{listed(names)}: right before clipping, after it each rank's gradients have a "
            f"factor of their own ({shown}): every rank clips by the norm of its own part, not "
            f"reduced over {', '.join(exhibit.wide_axes)}"
        )
        return cause("norm_clip", text, tensors=names, ranks=row.ranks)
    counted = _counted(exhibit, row)
    if counted is not None and exhibit.weights is not None:
        text = (
            f"{listed(names)}: a sum of the ranks' gradients each clipped by a factor of its "
            f"own: clipped before the reduction"
        )
        return cause("norm_clip", text, tensors=names, ranks=row.ranks)
    return None


def _rank_factors(exhibit: Exhibit, row: Row) -> dict[int, float] | None:
    """Return the factor of every rank's part, where each part has one."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    found: dict[int, float] = {}
    for part, coordinates in exhibit.regions(row).items():
        right = part_of(whole, part)
        power = float(right.square().sum())
        for at in coordinates:
            if not power:
                continue
            k = float((held[at] * right).sum()) / power
            off = float((held[at] - k * right).norm())
            if off > 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
                return None
            found[exhibit.rank_of(at)] = k
    return found if len(found) > 1 and _spread(list(found.values())) > 1e-4 else None


def clipped_before_reduction(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: gradients are still this rank's own when they are clipped, reduced later."""
    after = [r for r in exhibit.stage_rows("clipping") if r.name == row.name]
    if not after or not exhibit.copies_differ(row):
        return None
    if not exhibit.locals(after[0]) or exhibit.copies_differ(after[0]):
        return None
    names = names_of(exhibit.mismatches("gradients"))
    text = (
        f"{listed(names)}: clipped before the reduction: the replicas still disagree when the "
        f"norm is taken and agree afterwards"
    )
    return cause("norm_clip", text, tensors=names, ranks=row.ranks)


def clipping(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: gradients are right before clipping, one factor is wrong after it."""
    rows = exhibit.mismatches("clipping")
    names = [n for n in names_of(rows) if n not in ("total_norm", "clip_factor")]
    details = []
    norm = next((r for r in rows if r.name == "total_norm"), None)
    if norm is not None and exhibit.locals(norm):
        right = float(exhibit.reference(norm))
        values = {exhibit.rank_of(at): float(v) for at, v in exhibit.locals(norm).items()}
        ratios = {rank: value / right for rank, value in values.items() if right}
        if ratios and _spread(list(ratios.values())) < 1e-4:
            k = next(iter(ratios.values()))
            said, _ = meaning(k, 1e-4, exhibit.axes)
            details.append(f"total_norm is {number(k)} x the right one"
                           + (f" = {said}" if said else ""))  # fmt: skip
        elif ratios:
            shown = ", ".join(f"rank {r}: {v:.6g}" for r, v in values.items())
            details.append(f"total_norm differs by rank ({shown}), right is {right:.6g}")
    factors = [f for r in rows if r.name in names and (f := factor_of(exhibit, r))]
    k = factors[0][0] if factors else None
    if k is not None:
        details.append(f"the gradients are {number(k)} x the reference after it")
    over = ", ".join(f"{axis}={exhibit.axes[axis]}" for axis in exhibit.wide_axes)
    text = (
        f"right before clipping, wrong after it: {'; '.join(details) or listed(names)}: what is "
        f"sharded or replicated over {over} counts wrongly in the norm"
    )
    return cause("norm_clip", text, tensors=[*names_of(rows), *_parameters(exhibit)],
                 ranks=row.ranks, factor=k)  # fmt: skip


def _parameters(exhibit: Exhibit) -> list[str]:
    """Return the parameters that move wrongly in the step."""
    return names_of(exhibit.mismatches("parameters"))


def rank_text(exhibit: Exhibit, coordinate: Coordinate) -> str:
    """Return a rank's name."""
    return f"rank {exhibit.rank_of(coordinate)}"
