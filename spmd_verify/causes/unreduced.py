"""A value of forward that is a rank's summand where the sum is due: `missing_reduction`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import (
    affected,
    module_of,
    value_before,
)
from spmd_verify.causes.interventions import outputs_changed
from spmd_verify.causes.summands import partial_over, partial_parts
from spmd_verify.causes.words import cause, number
from spmd_verify.layouts import Coordinate, put_region, take_region
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row


def unreduced_output(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: a value used here is only this rank's summand."""
    before = _partial_before(exhibit, row)
    if before is None:
        return None
    name, axes, how = before
    alike = _alike_summand(exhibit, row, name, axes)
    if alike is not None:
        return alike
    over = ", ".join(axes)
    said = (
        f"yet {row.name} is computed from one rank's value: the all-reduce over {over} is missing"
    )
    if name != row.name and _is_used(exhibit, row, name, ()) is False:
        others = [axis for axis in exhibit.wide_axes if axis not in axes]
        other = next((axis for axis in others if _is_used(exhibit, row, name, (axis,))), None)
        if other is not None:
            said = (
                f"yet {row.name} is computed from sums over {other}: the all-reduce uses the group "
                f"of {other} instead of that of {over}"
            )
        else:
            return None  # it was added up: what is wrong lies behind it
    text = f"{name}: {how} over {over} equals the reference, {said}"
    return cause(
        "missing_reduction", text, tensors=[name, row.name, *affected(exhibit)], ranks=row.ranks,
        axis=axes[0],
    )  # fmt: skip


def _is_used(exhibit: Exhibit, row: Row, name: str, axes: tuple[str, ...]) -> bool | None:
    """Say whether every rank's value is what one device gives with its summand in the place.

    None where that cannot be run.
    """
    before = exhibit.by_key[exhibit.run, exhibit.step, "module_outputs", name]
    held, found = exhibit.locals(row), exhibit.locals(before)
    for axis in axes:
        found = {
            at: torch.stack([found[each] for each in line]).sum(0)
            for line in exhibit.lines(axis, found)
            for at in line
        }
    said = [_gives(exhibit, row, before, at, found[at]) for at in held if at in found]
    return None if None in said or not said else all(said)


def _gives(exhibit: Exhibit, row: Row, before: Row, at: Coordinate, value: Tensor) -> bool | None:
    """Say whether a rank's value of a row is that of one device with a part of an output other."""
    known, target = partial_parts(exhibit, before), exhibit.region(row, at)
    if known is None or target is None or at not in known[2]:
        return None
    source = known[2][at]

    def change(output: Tensor) -> Tensor:
        whole = output.detach().clone()
        put_region(whole, source, value.to(output.dtype))
        return output + (whole - output.detach())  # backward goes on as before

    path = before.name.partition("#")[0]
    record = exhibit.runs.record(exhibit.batch, within=outputs_changed({path: change}))
    made = None if record is None else record[row.stage].get(row.name)
    if made is None:
        return None
    due = take_region(as_real(made).to(torch.float64), target)
    local = exhibit.locals(row)[at]
    if due.shape != local.shape:
        return None
    return float((due - local).norm()) <= 4.0 * exhibit.tolerance(row)


def summed_over_other(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: summands over one axis are added up over another, of the samples.

    The sum over the first is then that of the reference's samples, up to a bias that is added
    once on every rank.
    """
    held, whole = exhibit.locals(row), exhibit.reference(row)
    if whole.ndim == 0:
        return None
    for axis, other in itertools.permutations(exhibit.wide_axes, 2):
        parts = whole.chunk(exhibit.axes[other])
        shapes = {tuple(value.shape) for value in (*parts, *held.values())}
        lines = exhibit.lines(axis, held)
        if len(shapes) > 1 or len(lines) * exhibit.axes[axis] < len(exhibit.dump.ranks):
            continue
        due = torch.stack(parts).sum(0)
        times = exhibit.axes[axis] - exhibit.axes[other]
        allowed = 4.0 * exhibit.tolerance(row) * len(parts)
        for bias in _biases(exhibit, row, due):
            sums = (torch.stack([held[at] for at in line]).sum(0) for line in lines)
            if any(float((total - due - times * bias).norm()) > allowed for total in sums):
                continue
            text = (
                f"{row.name} is made of sums over {other} instead of {axis}: added up over {axis} "
                f"it is the sum of the reference over the samples of {other}; the all-reduce uses "
                f"the group of the other axis"
            )
            tensors = [row.name, *affected(exhibit)]
            return cause("missing_reduction", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _biases(exhibit: Exhibit, row: Row, like: Tensor) -> Iterator[Tensor]:
    """Give what a module may add to a sum: nothing, or a parameter of one dim."""
    yield torch.zeros_like(like)
    module = module_of(exhibit, row.name)
    path = row.name.partition("[")[0].partition("#")[0]
    for name, parameter in () if module is None else module.named_parameters(recurse=False):
        if parameter.ndim == 1 and parameter.shape[0] == like.shape[-1]:
            yield value_before(exhibit, f"{path}.{name}", parameter).expand_as(like)


def _alike_summand(exhibit: Exhibit, row: Row, name: str, axes: tuple[str, ...]) -> Cause | None:
    """`factor`: the summands of all ranks are one value: a factor, whatever was meant."""
    before = exhibit.by_key[exhibit.run, exhibit.step, "module_outputs", name]
    held, whole = exhibit.locals(before), exhibit.reference(before)
    count = math.prod(exhibit.axes[axis] for axis in axes)
    off = [float((local - whole / count).norm()) for local in held.values()
           if local.shape == whole.shape]  # fmt: skip
    if len(off) < len(held) or max(off) > 4.0 * exhibit.tolerance(before):
        return None
    over = " and ".join(axes)
    text = (
        f"{name} is {number(1.0 / count)} x the reference on every rank alike, and {row.name} is "
        f"computed from it: 1 / the {count} ranks of {over}"
    )
    return cause(
        "factor", text, factor=1.0 / count, axis=axes[0], ranks=row.ranks,
        tensors=[name, row.name, *affected(exhibit)],
    )  # fmt: skip


def _partial_before(exhibit: Exhibit, row: Row) -> tuple[str, tuple[str, ...], str] | None:
    """Return the last module output up to this one that is a summand: name, axes, SUM or MEAN."""
    rows = exhibit.stage_rows("module_outputs")
    names = [r.name for r in rows]
    end = names.index(row.name) if row.stage == "module_outputs" and row.name in names else None
    upto = rows if end is None else rows[: end + 1]
    for each in reversed(upto):
        found = partial_over(exhibit, each)
        if found is not None:
            return (each.name, *found)
    return None
