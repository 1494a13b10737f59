"""Causes of wrong gradients that follow from what each rank's part of the batch gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit, Piece, fit
from spmd_verify.causes.words import (
    cause,
    listed,
    meaning,
    names_of,
    number,
    ranks_text,
)
from spmd_verify.layouts import Coordinate, take_region
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row

# Elements per rank from which a factor that fits every part is no chance.
_FEW_ELEMENTS: Final = 8


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
    parameter = exhibit.by_key.get(("free", row.step, "parameters", row.name))
    everyone = set(exhibit.locals(parameter)) if parameter is not None else set(held)
    same_part = len(exhibit.regions(row)) <= 1
    without = sorted(exhibit.rank_of(at) for at in everyone - set(held))
    if held and without and same_part:
        text = (
            f"{row.name} has no gradient (None) on {ranks_text(without)}: it is unused there, and "
            f"its reduction never sees those ranks"
        )
        return cause("unused", text, tensors=[row.name], ranks=without)
    if not held and everyone:
        return _without_any(exhibit, row)
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


def _without_any(exhibit: Exhibit, row: Row) -> Cause:
    """`no_sync`: no rank has a gradient that one device has."""
    names = [r.name for r in exhibit.mismatches(row.stage) if not exhibit.locals(r)]
    wrappers = exhibit.fact("wrappers")
    why = "what backward gave never reaches it: its reduction is switched off" if wrappers else (
        "it is not used, or what backward gives is written elsewhere"
    )  # fmt: skip
    text = f"{listed(names)}: no rank has a gradient when the optimizer steps: {why}"
    return cause("no_sync" if wrappers else "unused", text, tensors=names, ranks=row.ranks)


def tied(exhibit: Exhibit, row: Row) -> Cause | None:
    """`tied`: the gradient of a tied parameter is only one use's share, or copies differ."""
    if not row.aliases:
        return None
    shares = exhibit.runs.untied_shares(row.name, list(row.aliases))
    if len(shares) < 2:
        return None
    both = " and ".join([row.name, *row.aliases])
    tolerance = 4.0 * exhibit.tolerance(row)
    for at, local in exhibit.locals(row).items():
        part = exhibit.region(row, at)
        if part is None:
            continue
        columns = [take_region(as_real(share).to(torch.float64), part) for share in shares.values()]
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
    return None


def stale(exhibit: Exhibit, row: Row) -> Cause | None:
    """`stale`: the gradient is the previous step's, or still holds it."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or row.step == 0 or exhibit.copies_differ(row):
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


class Factor(NamedTuple):
    """A tensor is `k` x the reference.

    Attributes:
        k: The factor.
        noise: Its relative noise.
        left: What it leaves, as a norm.
    """

    k: float
    noise: float
    left: float


def factor_of(exhibit: Exhibit, row: Row) -> Factor | None:
    """Return the factor where the tensor is k times the reference everywhere."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or exhibit.copies_differ(row):
        return None
    power = float(whole.square().sum())
    if not power:
        return None
    k = 1.0 + float(((found - whole) * whole).sum()) / power
    tolerance = exhibit.tolerance(row)
    left = left_by(found, whole, k)
    if left > tolerance * max(1.0, abs(k)):
        return None
    if abs(k - 1.0) * math.sqrt(power) <= tolerance:
        return None  # it is right
    return Factor(k, max(4.0 * tolerance / math.sqrt(power), 1e-9), left)


def left_by(found: Tensor, whole: Tensor, k: float) -> float:
    """Return what a multiple of one tensor leaves of another, as a norm."""
    return float((found - k * whole).norm())


def uniform_factor(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: `candidate = k x reference`."""
    found = factor_of(exhibit, row)
    if found is None:
        return None
    k, noise, left = found
    said, axis = meaning(k, noise, exhibit.axes)
    if not said and exhibit.reference(row).numel() == 1:
        return None
    rows = [
        r
        for r in exhibit.mismatches(row.stage)
        if (other := factor_of(exhibit, r)) and abs(other.k - k) < max(1e-3 * abs(k), 1e-9)
    ]
    names = names_of(rows)
    right = [r.name for r in exhibit.stage_rows(row.stage) if r.name not in names]
    only = " only" if right else ""
    why = f": {said}" if said else ""
    alike = [a for a, size in exhibit.axes.items() if axis and size == exhibit.axes[axis]]
    remedy = f" (divide by {' or '.join(alike)} once)" if axis and k > 1.0 else ""
    if remedy and abs(k - round(k)) < 1e-3:
        remedy = f"{remedy[:-1]}, or it is accumulated {k:.0f} times)"
    if abs(k) <= noise:
        remedy = " (what is computed from it is detached, or its gradient is lost)"
    text = f"{listed(names)}{only}: {number(k)} x the reference{why}{remedy}"
    return cause(
        "factor", text, residual=exhibit.multiple(row, left), tensors=names, factor=k, axis=axis,
        ranks=row.ranks,
    )  # fmt: skip


def own_data(exhibit: Exhibit, row: Row) -> Cause | None:
    """`no_sync`: what each rank holds is the gradient of its own part of the batch."""
    is_cut = _is_cut(exhibit, row)
    if not (exhibit.copies_differ(row) or is_cut) or len(exhibit.distinct_parts) < 2:
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
    over = axis or "the mesh"
    if is_cut:
        text = (
            f"each rank's part of the gradient of {listed(names)} is that of its own data, never "
            f"reduced over {over}"
        )
        return cause("missing_reduction", text, tensors=names, axis=axis, ranks=row.ranks)
    text = (
        f"the replicas of {listed(names)} disagree: each rank has the gradient of its own data, "
        f"never reduced over {over}{entered}"
    )
    kind = "no_sync" if wrappers else "missing_reduction"
    return cause(kind, text, tensors=names, axis=axis, ranks=row.ranks)


def _is_cut(exhibit: Exhibit, row: Row) -> bool:
    """Say whether ranks hold parts and no copies, of enough elements that chance fits none."""
    regions = exhibit.regions(row)
    is_large = exhibit.reference(row).numel() >= _FEW_ELEMENTS * len(exhibit.dump.ranks)
    return is_large and len(regions) > 1 and all(len(held) == 1 for held in regions.values())


def is_own_data(exhibit: Exhibit, row: Row) -> bool:
    """Say whether every rank's gradient is a multiple of its own part's, all by one factor."""
    return is_own(exhibit, row, exhibit.locals(row))


def is_own(exhibit: Exhibit, row: Row, ranks: Iterable[Coordinate]) -> bool:
    """Say whether the gradient of some ranks is a multiple of their own part's, by one factor."""
    factors, held = [], exhibit.locals(row)
    for at in ranks:
        local, record = held[at], exhibit.part_records.get(at)
        value = None if record is None else record["gradients"].get(row.name)
        part = exhibit.region(row, at)
        if value is None or part is None:
            return False
        own = take_region(as_real(value).to(torch.float64), part)
        power = float(own.square().sum())
        if not power:
            continue
        k = float((local * own).sum()) / power
        if float((local - k * own).norm()) > 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
            return False
        factors.append(k)
    return bool(factors) and max(factors) - min(factors) < 1e-3 * abs(factors[0])


def counted(
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


def spread(values: Sequence[float]) -> float:
    """Return the distance of the largest and the smallest value."""
    return max(values) - min(values)


def weighted_ranks(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor` or `double_reduction`: one part of the batch counts other than it should."""
    weights, shares = exhibit.weights, counted(exhibit, row)
    if weights is None or shares is None or len(weights) < 2:
        return None
    ratios = [c / w if w else math.inf for c, w in zip(shares, weights, strict=True)]
    usual = _usual(ratios)
    off = [i for i, r in enumerate(ratios) if abs(r - usual) > 1e-3]
    if not off:
        return None
    ranks = [part_ranks(exhibit)[i] for i in off]
    who = f"the contribution of {ranks_text(ranks)}"
    if set(ranks) & {part_ranks(exhibit)[i] for i in range(len(ratios)) if i not in off}:
        which = [str(exhibit.pieces[i].call) for i in off]
        who = f"what micro-batches {', '.join(dict.fromkeys(which))} of {ranks_text(ranks)} give"
    shown = ", ".join(number(ratios[i]) for i in off)
    rows = [r for r in exhibit.mismatches(row.stage) if _same_ratios(exhibit, r, ratios)]
    names = names_of([row, *rows])
    is_double = all(abs(ratios[i] - 2.0) < 1e-3 for i in off)
    kind = "double_reduction" if is_double else "factor"
    what = "counted twice" if is_double else f"counted {shown} x"
    if all(abs(ratios[i]) < 1e-3 for i in off):
        kind, what = "missing_reduction", "not counted at all (0.0 x)"
    text = f"{listed(names)}: {who} is {what}, the others {number(usual)} x; replicas agree"
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
        left = left_by(excess, own, k)
        if left > tolerance * max(1.0, abs(k)) or abs(k) < 1e-4:
            continue
        if not _all_excess(exhibit, term.gradients, k) or _is_any(exhibit, k):
            continue
        ratio = Fraction(k).limit_denominator(64)
        exactly = abs(k - float(ratio)) < 1e-3
        names = names_of(exhibit.mismatches(row.stage))
        text = (
            f"{listed(names)}: the excess is {number(k)} x the gradient of a term of the loss "
            f"({term.name} = {term.value:.6g})"
            + (": the term is missing" if exactly and ratio == -1 else "")
        )
        residual = exhibit.multiple(row, left)
        return cause("additive", text, residual=residual, tensors=names, ranks=row.ranks, factor=k)
    return None


def _is_any(exhibit: Exhibit, k: float) -> bool:
    """Say whether a multiple says nothing: one number is some multiple of any other."""
    size = sum(math.prod(r.shape) for r in exhibit.mismatches("gradients"))
    return size < 2 and abs(k - float(Fraction(k).limit_denominator(8))) > 1e-4


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
