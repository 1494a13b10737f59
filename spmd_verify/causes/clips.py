"""Causes of wrong clipping: gradients are right before it, one factor is wrong after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import counted, factor_of, spread
from spmd_verify.causes.words import cause, listed, meaning, names_of, number
from spmd_verify.layouts import Coordinate, take_region
from spmd_verify.record import Cause, Row

# Gradients whose factors differ by no more than this share are clipped by the same norm.
_FACTOR_NOISE: Final = 1e-5


def clip_factor(exhibit: Exhibit) -> float | None:
    """Return the factor by which the reference's own step shrinks all gradients, if it does.

    Seen where the step clips by hand: autograd's gradients and those the optimizer gets
    differ by one factor below 1.
    """
    torchs = exhibit.store.entry(exhibit.step, "clipping", "clip_factor")
    if exhibit.is_unclipped:
        return None
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
    if not factors or spread(factors) > 1e-6 or not factors[0] < 1.0 - 1e-9:
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
        factors = [each.k / shift for each in found if each is not None]
        if spread(factors) <= 1e-3 * abs(factors[0]):
            k = factors[0]
            said, axis = meaning(1.0 / k, 1e-4, exhibit.axes)
            if abs(k * right - 1.0) <= 1e-4:
                text = f"{listed(names)}: not clipped at all, one device clips ({number(right)} x)"
                return cause("norm_clip", text, tensors=names, factor=k, ranks=row.ranks)
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
    if counted(exhibit, row) is not None and exhibit.weights is not None:
        text = (
            f"{listed(names)}: a sum of the ranks' gradients each clipped by a factor of its "
            f"own: clipped before the reduction"
        )
        return cause("norm_clip", text, tensors=names, ranks=row.ranks)
    return None


def _rank_factors(exhibit: Exhibit, row: Row) -> dict[int, float] | None:
    """Return the factor of every rank's part, where each part has one and they differ."""
    factors = _factors(exhibit, row)
    if factors is None or len(factors) < 2 or spread(list(factors.values())) <= 1e-4:
        return None
    return {exhibit.rank_of(at): k for at, k in factors.items()}


def unclipped(exhibit: Exhibit) -> tuple[Exhibit, list[Row], str] | None:
    """Divide a wrong clipping by hand out of the gradients, where some are wrong before it too.

    Returns:
        The exhibit before clipping, the gradients that are wrong in it, and what to say of the
        clipping. None where no factor, or one factor alone, explains the gradients.
    """
    right = clip_factor(exhibit)
    if right is None:
        return None
    groups: list[tuple[dict[Coordinate, float], list[Row]]] = []
    rows = exhibit.mismatches("gradients")
    for row in rows:
        found = _all_factors(exhibit, row)
        if found is None:
            continue
        same = (rows for known, rows in groups if _is_alike(known, found))
        group = next(same, None)
        if group is None:
            groups.append((found, [row]))
        else:
            group.append(row)
    factors, scaled = max(groups, key=lambda each: len(each[1]), default=({}, []))
    if len(scaled) < 2 or len(factors) < len(exhibit.dump.ranks):
        return None
    before = exhibit.divided(factors)
    left = [row for row in before.mismatches("gradients") if not _is_right(before, row)]
    if not left:
        return None
    before.settle("gradients", [row.name for row in rows if row not in left])
    shift = right if exhibit.store.entry(exhibit.step, "clipping", "clip_factor") else 1.0
    shown = {exhibit.rank_of(at): number(k / shift) for at, k in factors.items()}
    times = ", ".join(f"rank {rank}: {k} x" for rank, k in shown.items())
    if len(set(shown.values())) == 1:
        times = f"{next(iter(shown.values()))} x"
    text = f"{times} the reference after clipping, as their norm is clipped with the others"
    return before, left, text


def _is_right(exhibit: Exhibit, row: Row) -> bool:
    """Say whether every rank's tensor is its part of the reference."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    return all(
        float((held[at] - take_region(whole, part)).norm()) <= 4.0 * exhibit.tolerance(row)
        for part, coordinates in exhibit.regions(row).items()
        for at in coordinates
    )


def _factors(exhibit: Exhibit, row: Row) -> dict[Coordinate, float] | None:
    """Return the factor of every rank's part that is not zero; None where one is no multiple."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    found: dict[Coordinate, float] = {}
    for part, coordinates in exhibit.regions(row).items():
        due = take_region(whole, part)
        power = float(due.square().sum())
        for at in coordinates if power else ():
            k = float((held[at] * due).sum()) / power
            off = float((held[at] - k * due).norm())
            if off > 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
                return None
            found[at] = k
    return found


def _all_factors(exhibit: Exhibit, row: Row) -> dict[Coordinate, float] | None:
    """Return the factor of every rank's tensor; None where one is no multiple or too short."""
    found = _factors(exhibit, row)
    parts = exhibit.regions(row)
    is_short = any(math.prod(part.shape) < 2 for part in parts)
    is_whole = found is not None and len(found) == sum(map(len, parts.values()))
    if found is None or not is_whole or is_short or not all(found.values()):
        return None
    return found


def _is_alike(left: Mapping[Coordinate, float], right: Mapping[Coordinate, float]) -> bool:
    """Say whether two gradients have the same factors."""
    return left.keys() == right.keys() and all(
        abs(left[at] / k - 1.0) <= _FACTOR_NOISE for at, k in right.items()
    )


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
    other = _other_calls(exhibit, row) or _other_limit(exhibit, row)
    if other is not None:
        return other
    details = []
    norm = next((r for r in rows if r.name == "total_norm"), None)
    if norm is not None and exhibit.locals(norm):
        right = float(exhibit.reference(norm))
        values = {exhibit.rank_of(at): float(v) for at, v in exhibit.locals(norm).items()}
        ratios = {rank: value / right for rank, value in values.items() if right}
        if ratios and spread(list(ratios.values())) < 1e-4:
            k = next(iter(ratios.values()))
            said, _ = meaning(k, 1e-4, exhibit.axes)
            details.append(f"total_norm is {number(k)} x the right one"
                           + (f" = {said}" if said else ""))  # fmt: skip
        elif ratios:
            shown = ", ".join(f"rank {r}: {v:.6g}" for r, v in values.items())
            details.append(f"total_norm differs by rank ({shown}), right is {right:.6g}")
    factors = [f for r in rows if r.name in names and (f := factor_of(exhibit, r))]
    is_one = factors and spread([f.k for f in factors]) <= 1e-3 * abs(factors[0].k)
    after = factors[0].k if is_one else None
    if after is not None:
        details.append(f"the gradients are {number(after)} x the reference after it")
    over = ", ".join(f"{axis}={exhibit.axes[axis]}" for axis in exhibit.wide_axes)
    text = (
        f"right before clipping, wrong after it: {'; '.join(details) or listed(names)}: what is "
        f"sharded or replicated over {over} counts wrongly in the norm"
    )
    return cause("norm_clip", text, tensors=[*names_of(rows), *_parameters(exhibit)],
                 ranks=row.ranks, factor=after)  # fmt: skip


def _other_calls(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: clipping is called more often than on one device, for some tensors each."""
    calls = len(exhibit.called("clipping", "total_norm"))
    names = exhibit.store.names(exhibit.step, "clipping")
    due = sum(name.partition("#")[0] == "total_norm" for name in names)
    if calls <= due:
        return None
    text = (
        f"right before clipping, wrong after it: clipped in {calls} calls, on one device in {due}: "
        f"the norm of each is that of its own tensors only"
    )
    tensors = [*names_of(exhibit.mismatches("clipping")), *_parameters(exhibit)]
    return cause("norm_clip", text, tensors=tensors, ranks=row.ranks)


def _other_limit(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: the norm is right, the limit it is held against is not."""
    shown = {r.name: r for r in exhibit.stage_rows("clipping") if exhibit.locals(r)}
    norm, limit = shown.get("total_norm"), shown.get("clip_factor")
    wrong = names_of(exhibit.mismatches("clipping"))
    if norm is None or limit is None or "total_norm" in wrong or "clip_factor" not in wrong:
        return None
    right = float(exhibit.reference(limit))
    if not right:
        return None
    ratios = [float(value) / right for value in exhibit.locals(limit).values()]
    k = ratios[0]
    if spread(ratios) > 1e-4 or max(float(v) for v in exhibit.locals(limit).values()) >= 1.0:
        return None
    said, axis = meaning(k, 1e-4, exhibit.axes)
    text = (
        f"right before clipping, {number(k)} x the reference after it, and the norm is right: it "
        f"is held against {number(k)} x the limit" + (f" = {said}" if said else "")
    )
    if right >= 1.0:
        text = "clipped by a right norm where one device does not clip: the limit is smaller"
    return cause("norm_clip", text, tensors=[*wrong, *_parameters(exhibit)], ranks=row.ranks,
                 factor=k, axis=axis)  # fmt: skip


def never_clipped(exhibit: Exhibit, row: Row) -> Cause | None:
    """`norm_clip`: one device clips its gradients, here they reach the optimizer as they are."""
    entry = exhibit.store.entry(exhibit.step, "clipping", "clip_factor")
    if entry is None or not entry.value or entry.value >= 1.0:
        return None
    if any(exhibit.locals(r) for r in exhibit.stage_rows("clipping")):
        return None
    rows = [r for r in exhibit.stage_rows("gradients") if exhibit.locals(r)]
    rows = [r for r in rows if bool(exhibit.reference(r).any())]
    if not rows or not all(_is_right(exhibit, r) for r in rows):
        return None
    names = names_of(exhibit.mismatches(row.stage))
    text = (
        f"one device clips its gradients ({number(entry.value)} x), here they reach the optimizer "
        f"unclipped, {number(1.0 / entry.value)} x too large: {listed(names)}"
    )
    owners = [r.name for r in rows if any(name.startswith(f"{r.name}.") for name in names)]
    tensors = list(dict.fromkeys([*names, *owners, *_parameters(exhibit)]))
    return cause("norm_clip", text, tensors=tensors, ranks=row.ranks, factor=1.0 / entry.value)


def _parameters(exhibit: Exhibit) -> list[str]:
    """Return the parameters that move wrongly in the step."""
    return names_of(exhibit.mismatches("parameters"))
