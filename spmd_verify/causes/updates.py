"""Causes of wrong parameters behind right gradients: the update itself."""

from __future__ import annotations

import math

from torch import Tensor, nn

from spmd_verify.causes.averages import followed, said
from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import left_by
from spmd_verify.causes.patterns import before_step
from spmd_verify.causes.words import cause, listed, meaning, names_of, number, ranks_text, rows_text
from spmd_verify.layouts import take_region
from spmd_verify.record import Cause, Row
from spmd_verify.reference.trajectory import optimizers_of

# Share of a fault that running the optimizer on a shard may leave of it. Gradients that differ by
# rounding move single elements of a bfloat16 product inside (Newton-Schulz) by 2^-8 of themselves;
# over a whole shard that leaves less than a quarter of it.
REPRODUCED = 2.0**-10


def frozen_moved(exhibit: Exhibit, row: Row) -> Cause | None:
    """`unused`: a frozen parameter moved."""
    before = before_step(exhibit, row)
    is_moving = before is None or bool((exhibit.reference(row) != before).any())
    if row.name in exhibit.store.index.trainable or is_moving:
        return None
    text = f"{row.name} is frozen, yet it moved"
    return cause(
        "unused", text, tensors=names_of(exhibit.mismatches("parameters")), ranks=row.ranks
    )


def without_gradient(exhibit: Exhibit, row: Row) -> Cause | None:
    """`unused`: a parameter that one device gives no gradient is updated."""
    known = set(exhibit.store.names(exhibit.step, "gradients"))
    if row.name in known or row.name not in exhibit.store.index.trainable:
        return None
    names = [name for name in names_of(exhibit.mismatches("parameters")) if name not in known]
    text = (
        f"{listed(names)}: unused on one device (the gradient is None, the optimizer leaves it "
        f"alone), yet updated here: a missing gradient was filled, so weight decay moves it"
    )
    return cause("unused", text, tensors=names, ranks=row.ranks)


def rate_in_step(exhibit: Exhibit, row: Row) -> Cause | None:
    """`inputs`: some ranks set another learning rate within the step; the next step shows it."""
    before = before_step(exhibit, row)
    if before is None:
        return None
    held, whole = exhibit.locals(row), exhibit.reference(row)
    for rate in exhibit.mismatches_of_numbers(row.step + 1):
        seen = rate.worst
        if rate.name.rpartition(".")[2] != "lr" or seen is None or not seen.expected:
            continue
        k = seen.actual / seen.expected
        off = []
        for part, coordinates in exhibit.regions(row).items():
            start = take_region(before, part)
            right = take_region(whole, part) - start
            for at in coordinates:
                times = k if exhibit.rank_of(at) in rate.ranks else 1.0
                off.append(left_by(held[at] - start, right, times))
        if off and max(off) <= 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
            names = names_of(exhibit.mismatches("parameters"))
            text = (
                f"{rate.name} is {seen.actual:.9g} after the step on {ranks_text(rate.ranks)}, "
                f"expected {seen.expected:.9g}, and the update of {listed(names)} is as many times "
                f"({number(k)} x) the reference's there: it is set within the step"
            )
            return cause("inputs", text, tensors=[rate.name, row.name], ranks=rate.ranks, factor=k)
    return None


def _unmoved(exhibit: Exhibit, row: Row) -> bool:
    """Say whether the candidate still has the parameter of the step before."""
    found, before = exhibit.assembled(row), before_step(exhibit, row)
    if found is None or before is None:
        return False
    own = before
    if row.step > 0:
        own_before = exhibit.assembled(row, row.step - 1)
        own = before if own_before is None else own_before
    moved = float((exhibit.reference(row) - before).norm())
    return float((found - own).norm()) <= 1e-6 * moved + 1e-12


def stale(exhibit: Exhibit, row: Row) -> Cause | None:
    """`stale`: parameters do not move while their gradients are right."""
    if not _unmoved(exhibit, row):
        return None
    rows = [r for r in exhibit.mismatches("parameters") if _unmoved(exhibit, r)]
    names = names_of([row, *rows])
    foreign = exhibit.fact("foreign")
    right = [r for r in exhibit.stage_rows("parameters") if r.name not in names]
    # Parameters that move though the optimizer holds none are written by the style itself.
    is_written = not exhibit.fact("held") and any(
        r.name in exhibit.store.index.trainable for r in right
    )
    why = ": the update never reaches the model"
    if foreign and not is_written:
        why = (
            f": the optimizer holds {foreign} tensors that are not the model's parameters (it was "
            f"built before they were replaced)"
        )
    source = followed(exhibit, row)
    if source is not None:
        text = (
            f"{listed(names)} unchanged by the step: {said(row, source)}; here it keeps "
            f"what it was before the step: what was updated is a copy, and never written back"
        )
        return cause("stale", text, tensors=names, ranks=row.ranks)
    text = f"{listed(names)} unchanged by the step while the gradients are right{why}"
    return cause("stale", text, tensors=names, ranks=row.ranks)


def partly_stale(exhibit: Exhibit, row: Row) -> Cause | None:
    """`stale` or `uneven`: some rows, or some ranks, keep the values of the step before."""
    held, whole, before = exhibit.locals(row), exhibit.reference(row), before_step(exhibit, row)
    if before is None:
        return None
    tolerance = exhibit.tolerance(row)
    stuck: set[int] = set()
    for part, coordinates in exhibit.regions(row).items():
        for at in coordinates:
            off = float((held[at] - take_region(whole, part)).norm()) > tolerance
            kept = float((held[at] - take_region(before, part)).norm()) <= tolerance
            if off and not kept:
                stuck = set()
                break
            if off:
                stuck.add(exhibit.rank_of(at))
        else:
            continue
        break
    names = names_of(exhibit.mismatches("parameters"))
    if stuck and len(stuck) < len(held):
        text = (
            f"{listed(names)}: {ranks_text(stuck)} still has the values of the step before; the "
            f"update is not sent there"
        )
        return cause("stale", text, tensors=names, ranks=sorted(stuck))
    return _stuck_rows(exhibit, row, before, tolerance)


def _stuck_rows(exhibit: Exhibit, row: Row, before: Tensor, tolerance: float) -> Cause | None:
    """Say that some rows keep the values of the step before and the rest is right."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.ndim == 0:
        return None
    flat = [value.reshape(value.shape[0], -1) for value in (found, whole, before)]
    wrong = (flat[0] - flat[1]).norm(dim=1) > tolerance
    kept = (flat[0] - flat[2]).norm(dim=1) <= tolerance
    if not bool(wrong.any()) or bool((wrong & ~kept).any()):
        return None
    rows = [int(i) for i in wrong.nonzero().flatten()]
    size = found.shape[0]
    is_tail = rows[-1] == size - 1 and any(size % n for n in exhibit.axes.values() if n > 1)
    kind = "uneven" if is_tail else "stale"
    tail = f" ({size} rows do not divide by the ranks)" if is_tail else ""
    text = (
        f"{row.name}: rows {rows_text(rows)} of {size} are never updated{tail}, the others are "
        f"right"
    )
    names = names_of(exhibit.mismatches("parameters"))
    return cause(kind, text, tensors=[row.name, *names], ranks=row.ranks)


def optimizer_on_shards(exhibit: Exhibit, row: Row) -> Cause | None:
    """`optimizer_sharded`: the update is what the optimizer makes of a shard alone."""
    if not exhibit.is_right("gradients"):
        return None
    names = names_of(exhibit.mismatches("parameters"))
    optimizer = exhibit.fact("optimizers") or ["the optimizer"]
    shift = _constant_excess(exhibit, row)
    if shift is not None:
        size = math.prod(row.shape)
        text = (
            f"{listed(names)}: gradients right, every element of the update of {row.name} off by "
            f"{shift:.4g}: {optimizer[0]} is not element-wise, and a mean over the tensor's {size} "
            f"elements is taken wrongly over its shards (padding counted, or a part only)"
        )
        return cause("optimizer_sharded", text, tensors=names, ranks=row.ranks)
    by_rank = _update_factors(exhibit, row)
    simulated = _is_shardwise(exhibit, row)
    if not simulated and by_rank is None:
        return None
    norm = ""
    if by_rank is not None:
        shown = ", ".join(f"rank {r}: {number(k)} x" for r, k in by_rank.items())
        norm = f"; the update is scaled per rank ({shown}): a norm or mean was taken over the shard"
    text = (
        f"{listed(names)}: gradients right, update wrong: {optimizer[0]} is not element-wise and "
        f"sees only this rank's shard{norm}"
    )
    return cause("optimizer_sharded", text, tensors=names, ranks=row.ranks)


def _constant_excess(exhibit: Exhibit, row: Row) -> float | None:
    """Return by how much all elements of an update are off, where that is one number."""
    found = exhibit.assembled(row)
    if found is None or found.numel() < 4:
        return None
    excess = found - exhibit.reference(row)
    mean = float(excess.mean())
    left = float((excess - mean).norm())
    is_constant = left <= 4.0 * exhibit.tolerance(row) and abs(mean) * found.numel() ** 0.5 > left
    return mean if is_constant else None


def _update_factors(exhibit: Exhibit, row: Row) -> dict[int, float] | None:
    """Return the factor of every rank's update, where each shard has one of its own."""
    before = before_step(exhibit, row)
    if before is None:
        return None
    held, whole = exhibit.locals(row), exhibit.reference(row)
    found: dict[int, float] = {}
    if len(exhibit.regions(row)) == 1:
        return _block_factors(exhibit, row, before)
    for part, coordinates in exhibit.regions(row).items():
        right = take_region(whole, part) - take_region(before, part)
        power = float(right.square().sum())
        if not power:
            continue
        own = held[coordinates[0]] - take_region(before, part)
        k = float((own * right).sum()) / power
        if float((own - k * right).norm()) > 4.0 * exhibit.tolerance(row) + 1e-4 * float(
            own.norm()
        ):
            return None
        found.update({exhibit.rank_of(at): k for at in coordinates})
    values = list(found.values())
    return found if len(values) > 1 and max(values) - min(values) > 1e-5 else None


def _block_factors(exhibit: Exhibit, row: Row, before: Tensor) -> dict[int, float] | None:
    """Return the factor of every block of a whole parameter, cut as ranks would own it."""
    found = exhibit.assembled(row)
    if found is None or found.ndim == 0:
        return None
    own, right = found - before, exhibit.reference(row) - before
    for axis in exhibit.wide_axes:
        for dim in range(found.ndim):
            blocks = list(
                zip(*(v.chunk(exhibit.axes[axis], dim) for v in (own, right)), strict=True)
            )
            factors: list[float] = []
            for mine, due in blocks:
                power = float(due.square().sum())
                k = float((mine * due).sum()) / power if power else 1.0
                off = float((mine - k * due).norm())
                if off > 4.0 * exhibit.tolerance(row) + 1e-4 * float(mine.norm()):
                    break
                factors.append(k)
            is_whole = len(factors) == len(blocks) > 1
            if is_whole and max(factors) - min(factors) > 1e-5:
                return dict(enumerate(factors))
    return None


def _is_shardwise(exhibit: Exhibit, row: Row) -> bool:
    """Say whether running the optimizer on one rank's shards alone gives that rank's update."""
    at = next(iter(exhibit.locals(row)), None)
    if at is None or exhibit.step > 0 or len(exhibit.regions(row)) < 2:
        return False
    gradient_rows = {r.name: r for r in exhibit.stage_rows("gradients")}
    shards: dict[str, nn.Parameter] = {}
    for each in exhibit.stage_rows("parameters"):
        part = exhibit.region(each, at) if exhibit.locals(each).get(at) is not None else None
        gradient = gradient_rows.get(each.name)
        before = before_step(exhibit, each)
        if part is None or gradient is None or before is None:
            continue
        shard = nn.Parameter(take_region(before, part).clone())
        shard.grad = take_region(exhibit.reference(gradient), part).clone()
        shards[each.name] = shard
    if row.name not in shards:
        return False
    holder = nn.ParameterList(shards.values())
    try:
        for single in optimizers_of(exhibit.case.optimizer(holder)):
            single.step()
    except Exception:  # noqa: BLE001 - a user's optimizer on tensors it was not written for
        return False
    local = exhibit.locals(row)[at]
    part = exhibit.region(row, at)
    assert part is not None, "its shard was made from it"
    moved = float((local - take_region(exhibit.reference(row), part)).norm())
    left = float((local - shards[row.name].detach()).norm())
    return left <= max(4.0 * exhibit.tolerance(row), REPRODUCED * moved)


def scaled_update(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: the update is k times the reference's."""
    found, whole, before = exhibit.assembled(row), exhibit.reference(row), before_step(exhibit, row)
    if found is None or before is None or exhibit.copies_differ(row):
        return None
    right, own = whole - before, found - before
    power = float(right.square().sum())
    if not power:
        return None
    k = float((own * right).sum()) / power
    tolerance = 4.0 * exhibit.tolerance(row)
    left = left_by(own, right, k)
    if left > tolerance * max(1.0, abs(k)) or right.numel() < 2:
        return None
    names = names_of(exhibit.mismatches("parameters"))
    said, axis = meaning(k, max(tolerance / power**0.5, 1e-6), exhibit.axes)
    text = f"{listed(names)}: the update is {number(k)} x the reference's" + (
        f": {said}" if said else ""
    )
    return cause(
        "factor", text, residual=exhibit.multiple(row, left), tensors=names, factor=k, axis=axis,
        ranks=row.ranks,
    )  # fmt: skip


def scaled_value(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor`: the parameter itself is k times the reference's after the step."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or whole.numel() < 4 or exhibit.copies_differ(row) or not bool(whole.any()):
        return None
    k = float((found * whole).sum() / whole.square().sum())
    tolerance = 4.0 * exhibit.tolerance(row)
    left = left_by(found, whole, k)
    if left > tolerance * max(1.0, abs(k)) or left_by(found, whole, 1.0) <= tolerance:
        return None
    names = names_of(exhibit.mismatches("parameters"))
    said, axis = meaning(k, max(tolerance / float(whole.norm()), 1e-6), exhibit.axes)
    text = (
        f"{listed(names)}: the values themselves are {number(k)} x the reference's after the step"
        + (f": {said}" if said else "")
        + ", not their update: they are written, summed or decayed beside the optimizer"
    )
    return cause(
        "factor", text, residual=exhibit.multiple(row, left), tensors=names, factor=k, axis=axis,
        ranks=row.ranks,
    )  # fmt: skip


def replicas_drift(exhibit: Exhibit, row: Row) -> Cause | None:
    """`no_sync`: replicas of a parameter differ after the step."""
    if not exhibit.copies_differ(row):
        return None
    rows = exhibit.mismatches("parameters")
    names = names_of(rows)
    kind = "tied" if row.aliases else "no_sync"
    both = f" ({' and '.join([row.name, *row.aliases])} are tied)" if row.aliases else ""
    text = (
        f"the replicas of {listed(names)} differ after the step though their gradients agree{both}"
    )
    return cause(kind, text, tensors=[*names, *row.aliases], ranks=row.ranks)


def update_wrong(exhibit: Exhibit, row: Row) -> Cause | None:
    """`optimizer_state`: gradients and hyper-parameters agree, the update does not."""
    has_state = any(True for _ in exhibit.stage_rows("optimizer_state"))
    if not has_state or not exhibit.is_right("gradients") or not exhibit.is_right("clipping"):
        return None
    seen = [r for r in exhibit.stage_rows("optimizer_state") if exhibit.locals(r)]
    if seen and exhibit.is_right("optimizer_state"):
        return None
    names = names_of(exhibit.mismatches("parameters"))
    text = f"{listed(names)}: the update is wrong while gradients agree: state that is not shown"
    return cause("optimizer_state", text, tensors=names, ranks=row.ranks)
