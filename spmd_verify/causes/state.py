"""Causes that need no arithmetic: inputs, initial state, optimizer state, buffers."""

from __future__ import annotations

import torch

from spmd_verify.causes.exhibit import Exhibit, fit
from spmd_verify.causes.patterns import before_step
from spmd_verify.causes.words import (
    cause,
    listed,
    names_of,
    number,
    owners_of,
    ranks_text,
    rows_text,
)
from spmd_verify.layouts import Coordinate, take_region
from spmd_verify.record import Cause, Row
from spmd_verify.seen_inputs import Argument


def inputs(exhibit: Exhibit, row: Row) -> Cause | None:
    """`inputs`: ranks were fed something else than the global batch, or hyper-parameters differ."""
    affected = names_of(exhibit.mismatches("gradients")) or names_of(
        exhibit.mismatches("parameters")
    )
    argument = exhibit.seen.arguments.get(row.name)
    if argument is None:
        rows = [r for r in exhibit.rows if r.stage == "inputs" and r.step == row.step]
        numbers = [r for r in rows if r.verdict == row.verdict and not exhibit.is_known(r)]
        text = "; ".join(map(_number_text, numbers)) or (
            f"{row.name} is not what the reference has there"
        )
        return cause("inputs", text, ranks=row.ranks, tensors=[row.name, *affected])
    if not argument.is_known:
        if exhibit.is_chance_open:
            return None
        if exhibit.experiments.get("no_random"):
            text = (
                f"{row.name}: {_seen_text(argument)}; the difference vanishes when nothing random "
                f"is drawn: random numbers that one device does not draw are in the data"
            )
            return cause("random_stream", text, ranks=row.ranks, tensors=[row.name, *affected])
    return cause(
        "inputs",
        f"{row.name}: {_seen_text(argument)}",
        ranks=row.ranks,
        tensors=[row.name, *affected],
    )


def _number_text(row: Row) -> str:
    """Say what a hyper-parameter is and what it should be."""
    if row.worst is None:
        return f"{row.name} differs"
    text = f"{row.name} is {row.worst.actual:.9g}, expected {row.worst.expected:.9g}"
    if row.worst.expected:
        text += f" ({number(row.worst.actual / row.worst.expected)} x)"
    return text


def _seen_text(argument: Argument) -> str:
    """Say which slices were never seen, seen too often, or altered."""
    unit = "sample" if argument.dim == 0 else f"index of dim {argument.dim}"
    missing, doubled = argument.missing(), argument.doubled()
    said = [
        f"{argument.reached()} slices reach forward on all ranks, the batch has {argument.size}"
    ]
    seen = argument.size - len(missing)
    if missing:
        which = f"{unit} {rows_text(missing)}"
        said.append(
            f"{which} of {argument.size} never seen, only {seen} of {argument.size} reach forward"
        )
    if doubled:
        said.append(f"{unit} {rows_text(doubled)} seen more often than the others")
    altered = {at for at, seen in argument.indices.items() if None in seen}
    if altered:
        count = sum(index is None for seen in argument.indices.values() for index in seen)
        said.append(
            f"{count} of the {argument.reached()} slices that reach forward are none of the global "
            f"batch's {argument.size}"
        )
    return "; ".join(said) or "the slices come in another order"


def initial(exhibit: Exhibit, row: Row) -> Cause | None:
    """`initial`: differs before step 0."""
    rows = exhibit.mismatches("initial_state", 0)
    names = names_of(rows)
    detail = "not the single-device model's"
    wrong = _wrong_ranks(exhibit, row)
    who = (
        f" (wrong on {ranks_text(wrong)})"
        if wrong and len(wrong) < len(exhibit.locals(row))
        else ""
    )
    if exhibit.copies_differ(row):
        axes = [axis for axis in exhibit.wide_axes if _differs_along(exhibit, row, axis)]
        detail = f"not the same on all ranks of {', '.join(axes) or 'the mesh'}"
    else:
        repeated = _repeated(exhibit, row)
        if repeated:
            detail = repeated
    text = f"{listed(names)}: {detail} before step 0{who} (rank-dependent initialisation)"
    return cause("initial", text, ranks=row.ranks, tensors=names)


def _differs_along(exhibit: Exhibit, row: Row, axis: str) -> bool:
    held = exhibit.locals(row)
    return any(
        not torch.equal(held[line[0]], held[at])
        for line in exhibit.lines(axis, held)
        for at in line[1:]
        if held[line[0]].shape == held[at].shape
    )


def _repeated(exhibit: Exhibit, row: Row) -> str:
    """Say that ranks hold another rank's shard, where that is so."""
    whole = exhibit.reference(row)
    regions = exhibit.regions(row)
    for part, coordinates in regions.items():
        local = exhibit.locals(row)[coordinates[0]]
        for other, owners in regions.items():
            same = other != part and tuple(other.shape) == tuple(local.shape)
            if same and torch.equal(take_region(whole, other), local):
                mine = exhibit.rank_of(coordinates[0])
                return f"rank {mine} holds the shard of rank {exhibit.rank_of(owners[0])}"
    return ""


def optimizer_state(exhibit: Exhibit, row: Row) -> Cause | None:
    """`optimizer_state`: state is wrong while gradients and hyper-parameters agree."""
    rows = exhibit.mismatches("optimizer_state")
    names = names_of(rows)
    optimizers = ", ".join(exhibit.fact("optimizers") or ["the optimizer"])
    set_within = _number_of_step(exhibit, row)
    if set_within is not None:
        return set_within
    text = f"{listed(names)} of {optimizers}: wrong while every gradient agrees"
    detail = _started_anew(exhibit, row) or _state_detail(exhibit, row)
    return cause(
        "optimizer_state",
        f"{text}{': ' + detail if detail else ''}",
        ranks=row.ranks,
        tensors=[*names, *owners_of(names)],
    )


def _number_of_step(exhibit: Exhibit, row: Row) -> Cause | None:
    """`inputs`: the ranks whose state is wrong set a number of the optimizer within the step."""
    wrong = _wrong_ranks(exhibit, row)
    for n in exhibit.mismatches_of_numbers(row.step + 1):
        # The learning rate enters no state that is an average of gradients.
        if n.name.rpartition(".")[2] == "lr" or sorted(n.ranks) != sorted(wrong):
            continue
        names = names_of(exhibit.mismatches("optimizer_state"))
        text = (
            f"{_number_text(n)} after the step on {ranks_text(wrong)}, where the state of "
            f"{listed(owners_of(names))} is wrong while every gradient agrees: it is set within "
            f"the step"
        )
        return cause("inputs", text, ranks=wrong, tensors=[n.name, *names, *owners_of(names)])
    return None


def _started_anew(exhibit: Exhibit, row: Row) -> str:
    """Say that the state was lost before the step, where it is what a first step leaves."""
    if row.step == 0:
        return ""
    for each in exhibit.mismatches("optimizer_state"):
        owner, _, key = each.name.rpartition(".")
        found, right = exhibit.assembled(each), exhibit.reference(each)
        if found is None:
            continue
        if key == "step" and float(found.max()) == 1.0 < float(right.max()):
            others = [r for r in exhibit.mismatches("optimizer_state")
                      if r.name.startswith(f"{owner}.") and r.name != each.name]  # fmt: skip
            if any(not _is_of_step_before(exhibit, r) for r in others):
                return f"the state was lost, the counter is 1 where {float(right.max()):g} is due"
        rows = [*exhibit.stage_rows("clipping"), *exhibit.stage_rows("gradients")]
        gradient = next((r for r in rows if r.name == owner), None)
        if key == "momentum_buffer" and gradient is not None and found.any():
            columns = [exhibit.reference(gradient)]
            rows = exhibit.stage_rows("parameters")
            parameter = next((r for r in rows if r.name == owner), None)
            before = None if parameter is None else before_step(exhibit, parameter)
            columns += [] if before is None else [before]  # weight decay
            weights = fit(columns, found, exhibit.tolerance(each) / float(found.norm()))
            if weights is not None and abs(weights[0] - 1.0) < 1e-4:
                return "the momentum was lost: the buffer is made of this step's gradient alone"
    return ""


def _is_of_step_before(exhibit: Exhibit, row: Row) -> bool:
    """Say whether state is still that of the step before."""
    found, before = exhibit.assembled(row), exhibit.reference(row, row.step - 1)
    return found is not None and float((found - before).norm()) <= exhibit.tolerance(row)


def only_here(exhibit: Exhibit, row: Row) -> Cause | None:
    """`unused`: a gradient or state of a parameter that one device does not train."""
    base, _, call = row.name.partition("#")
    if call and base in exhibit.store.index.trainable:
        return _once_more(exhibit, row, int(call))
    if exhibit.is_known(row) or row.name in exhibit.store.index.trainable:
        return None
    names = [
        r.name
        for r in exhibit.rows
        if r.stage == row.stage and r.step == row.step and r.verdict == row.verdict
        and not exhibit.is_known(r)
    ]  # fmt: skip
    text = (
        f"{listed(names)}: frozen on one device, yet it gets a gradient here: requires_grad was "
        f"lost when the parameter was replaced"
    )
    return cause("unused", text, tensors=names, ranks=row.ranks)


def _once_more(exhibit: Exhibit, row: Row, times: int) -> Cause:
    """Say that gradients are clipped behind the update, or that there is one update too many."""
    rows = [r for r in exhibit.rows if r.stage == row.stage and r.step == row.step
            and r.verdict == row.verdict and not exhibit.is_known(r)]  # fmt: skip
    names = list(dict.fromkeys(r.name.partition("#")[0] for r in rows if "#" in r.name))
    clipping = {bool(r.shape): bool(exhibit.locals(r)) for r in exhibit.stage_rows("clipping")}
    if clipping.get(False) and not clipping.get(True):
        text = (
            f"{listed(names)}: clipped when the optimizer has stepped already: the update is made "
            f"of unclipped gradients"
        )
        return cause("norm_clip", text, ranks=row.ranks, tensors=[row.name, *names])
    text = (
        f"{listed(names)}: the optimizer steps {times} times within the step, on one device "
        f"{times - 1} {'time' if times == 2 else 'times'}: every update is made again"
    )
    return cause("optimizer_state", text, ranks=row.ranks, tensors=[row.name, *names])


def _state_detail(exhibit: Exhibit, row: Row) -> str:
    """Say what the wrong state is instead."""
    held = exhibit.locals(row)
    wrong = _wrong_ranks(exhibit, row)
    tolerance = exhibit.tolerance(row)
    whole = exhibit.reference(row)
    said = ranks_text(wrong) if 0 < len(wrong) < len(held) else ""
    for part, coordinates in exhibit.regions(row).items():
        local, right = held[coordinates[0]], take_region(whole, part)
        if float((local - right).norm()) <= tolerance:
            continue
        if not bool(local.any()):
            return f"it is zero {('on ' + said) if said else ''}".strip()
        if row.step > 0:
            before = take_region(exhibit.reference(row, row.step - 1), part)
            if float((local - before).norm()) <= tolerance:
                return "it is the state of the step before"
        k = float((local * right).sum() / right.square().sum().clamp(min=1e-300))
        if float((local - k * right).norm()) <= tolerance * max(1.0, abs(k)):
            return f"it is {number(k)} x the reference" + (f" on {said}" if said else "")
    return f"wrong on {said}" if said else ""


def _wrong_ranks(exhibit: Exhibit, row: Row) -> list[int]:
    """Return the ranks whose part is not the reference's."""
    whole, tolerance, held = exhibit.reference(row), exhibit.tolerance(row), exhibit.locals(row)
    return [
        exhibit.rank_of(at)
        for part, coordinates in exhibit.regions(row).items()
        for at in coordinates
        if float((held[at] - take_region(whole, part)).norm()) > tolerance
    ]


def buffer(exhibit: Exhibit, row: Row) -> Cause | None:
    """`buffer`: parameters are right, a buffer is wrong."""
    rows = exhibit.mismatches("buffers")
    names = names_of(rows)
    details = []
    tolerance, held = exhibit.tolerance(row), exhibit.locals(row)
    own = [
        exhibit.rank_of(at)
        for at, local in held.items()
        if _is_own(exhibit, row, at, local, tolerance)
    ]
    if own and len(own) == len(held):
        details.append("each rank has what its own part of the batch gives")
    elif own and not exhibit.copies_differ(row):
        details.append(f"all ranks have what the part of {ranks_text(own[:1])} alone gives")
    elif exhibit.copies_differ(row):
        details.append("the ranks have other values")
    whole = exhibit.reference(row)
    first = next(iter(held.values()), None)
    if not own and first is not None and first.shape == whole.shape and bool(whole.any()):
        k = float((first * whole).sum() / whole.square().sum())
        if float((first - k * whole).norm()) <= tolerance * max(1.0, abs(k)):
            details.append(f"it is {number(k)} x the reference")
    detail = f": {'; '.join(details)}" if details else ""
    text = f"{listed(names)} wrong since step {row.step} while every parameter agrees{detail}"
    return cause("buffer", text, ranks=row.ranks, tensors=names)


def _is_own(
    exhibit: Exhibit, row: Row, at: Coordinate, local: torch.Tensor, tolerance: float
) -> bool:
    """Say whether a rank's buffer is what one device gets from that rank's part alone."""
    record = exhibit.part_records.get(at)
    value = None if record is None else record.get("buffers", {}).get(row.name)
    if value is None or value.shape != local.shape:
        return False
    whole = exhibit.reference(row)
    is_other = float((value.to(torch.float64) - whole).norm()) > tolerance
    return is_other and float((local - value.to(torch.float64)).norm()) <= 4.0 * tolerance
