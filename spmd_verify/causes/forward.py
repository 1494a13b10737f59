"""Causes of a wrong value in forward: module outputs and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import left_by
from spmd_verify.causes.patterns import MOST_SLICES
from spmd_verify.causes.summands import partial_over
from spmd_verify.causes.words import cause, listed, meaning, names_of, number
from spmd_verify.layouts import Coordinate
from spmd_verify.norms import is_rounding
from spmd_verify.record import Cause, Row
from spmd_verify.reference.trajectory import named_parameters


def affected(exhibit: Exhibit) -> list[str]:
    """Return the parameters that a wrong forward reaches."""
    return names_of(exhibit.mismatches("gradients"))


def batch_statistics(exhibit: Exhibit, row: Row) -> Cause | None:
    """`batch_statistics`: the output is what this rank's part of the batch gives alone."""
    kind = _module_kind(exhibit, row.name)
    if _draws(exhibit, row):
        return None
    if not is_own_part(exhibit, row):
        return _other_statistics(exhibit, row, kind)
    is_norm = kind is not None and "Norm" in kind
    layer = f"{row.name} ({kind})" if kind else row.name
    if not is_norm and not _has_statistics(exhibit, row.name):
        return None
    text = (
        f"{layer} normalises with each rank's own batch statistics: forward equals that of the "
        f"rank's part of the batch alone"
    )
    return cause(
        "batch_statistics",
        text,
        tensors=[row.name, *affected(exhibit)],
        ranks=row.ranks,
        remedy="Use SyncBatchNorm (torch.nn.SyncBatchNorm.convert_sync_batchnorm), or a "
        "normalisation within the sample",
    )


def coupled_samples(exhibit: Exhibit, row: Row) -> Cause | None:
    """`cross_sample`: an output is what this rank's part of the batch gives alone."""
    if exhibit.is_chance_open or not is_own_part(exhibit, row):
        return None
    if not is_rounding(exhibit.reference(row)):
        # Indices may count the samples of the part, as a packed sequence's do: no values of them.
        return None
    over = [axis for axis in exhibit.wide_axes if exhibit.is_data_axis(axis)]
    if not over:
        return None
    kind = _module_kind(exhibit, row.name)
    layer = f"{row.name} ({kind})" if kind else row.name
    text = (
        f"{layer} couples samples: on every rank it gives what that rank's part of the batch over "
        f"{', '.join(over)} gives alone, not its rows of the whole batch's"
    )
    return cause("cross_sample", text, tensors=[row.name, *affected(exhibit)], ranks=row.ranks)


def _other_statistics(exhibit: Exhibit, row: Row, kind: str | None) -> Cause | None:
    """Say that a normalisation used other statistics: an output off by scale and shift only."""
    if kind is None or "Norm" not in kind:
        return None
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.ndim < 2:
        return None
    size = len(next(iter(exhibit.locals(row).values())))
    left = right = 0.0
    for rows in range(0, found.shape[0], max(size, 1)):
        part = slice(rows, rows + size)
        a, b = (v[part].transpose(0, 1).flatten(1) for v in (found, whole))
        b0 = b - b.mean(1, keepdim=True)
        k = ((a - a.mean(1, keepdim=True)) * b0).sum(1, keepdim=True) / b0.square().sum(
            1, keepdim=True
        ).clamp(min=1e-300)
        left += float((a - a.mean(1, keepdim=True) - k * b0).square().sum())
        right += float((a - b).square().sum())
    if math.sqrt(left) > 4.0 * exhibit.tolerance(row) or right == 0.0:
        return None
    text = (
        f"{row.name} ({kind}) normalises with other statistics than those of the whole batch: "
        f"every channel is off by a scale and a shift"
    )
    return cause(
        "batch_statistics", text, tensors=[row.name, *affected(exhibit)], ranks=row.ranks,
        remedy="Use SyncBatchNorm, or combine means and variances of all ranks",
    )  # fmt: skip


def is_own_part(exhibit: Exhibit, row: Row) -> bool:
    """Say whether every rank's tensor is what one device gives on that rank's part."""
    held = exhibit.locals(row)
    if len(exhibit.distinct_parts) < 2 or not held:
        return False
    tolerance = 4.0 * exhibit.tolerance(row)
    for at, local in held.items():
        record = exhibit.part_records.get(at)
        value = None if record is None else record.get(row.stage, {}).get(row.name)
        if value is None or value.shape != local.shape:
            return False
        if float((local - value.to(torch.float64)).norm()) > tolerance:
            return False
    return True


def _module_kind(exhibit: Exhibit, name: str) -> str | None:
    """Return the class of the module that an output is named after."""
    module = module_of(exhibit, name)
    return None if module is None else type(module).__name__


def module_of(exhibit: Exhibit, name: str) -> torch.nn.Module | None:
    """Return the module that an output is named after."""
    path = name.partition("[")[0].partition("#")[0]
    model, _ = exhibit.runs.device.build()
    if path == "model":
        return model
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _has_statistics(exhibit: Exhibit, name: str) -> bool:
    """Say whether a module keeps running statistics."""
    module = module_of(exhibit, name)
    return module is not None and any(
        "running" in n for n, _ in module.named_buffers(recurse=False)
    )


def _draws(exhibit: Exhibit, row: Row) -> bool:
    """Say whether the module draws random numbers: dropout by name, or by experiment."""
    return exhibit.experiments.get("no_random") is True or "Dropout" in (
        _module_kind(exhibit, row.name) or ""
    )


def random_stream(exhibit: Exhibit, row: Row) -> Cause | None:
    """`random_stream`: other random numbers than one device draws; vanishes without them."""
    masks = _masks_differ(exhibit, row)
    if not masks and exhibit.experiments.get("no_random") is not True:
        return None
    why = (
        "other elements are dropped than on one device"
        if masks
        else "the difference vanishes when nothing random is drawn"
    )
    same = _masks_alike(exhibit, row) if masks else ""
    text = f"{row.name}: {why}{same}: the random numbers are not the single device's for these rows"
    return cause("random_stream", text, tensors=[row.name, *affected(exhibit)], ranks=row.ranks)


def _masks_differ(exhibit: Exhibit, row: Row) -> bool:
    """Say whether an output is a dropout of the same values under another mask."""
    if "Dropout" not in (_module_kind(exhibit, row.name) or ""):
        return False
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None:
        return False
    return bool(((found == 0) != (whole == 0)).any())


def _masks_alike(exhibit: Exhibit, row: Row) -> str:
    """Say that all ranks dropped the same elements of their parts, where they did."""
    masks = [local == 0 for local in exhibit.locals(row).values()]
    alike = all(m.shape == masks[0].shape and torch.equal(m, masks[0]) for m in masks)
    return " (all ranks drew the same mask)" if alike and len(masks) > 1 else ""


def additive_bias(exhibit: Exhibit, row: Row) -> Cause | None:
    """`additive`: a wrong output is the right one and k times a parameter of its module."""
    module = module_of(exhibit, row.name)
    excess = excess_of(exhibit, row)
    if module is None or excess is None:
        return None
    path = row.name.partition("[")[0].partition("#")[0]
    for name, parameter in named_parameters(module)[0].items():
        vector = value_before(exhibit, f"{path}.{name}", parameter)
        if vector.ndim != 1 or excess.ndim == 0 or excess.shape[-1] != vector.shape[0]:
            continue
        if not bool(vector.any()):
            continue
        spread = vector.expand_as(excess)
        k = float((excess * spread).sum() / spread.square().sum())
        left = left_by(excess, spread, k)
        if left <= 4.0 * exhibit.tolerance(row) and _is_added_often(k, exhibit):
            full = f"{path}.{name}"
            said = _times_text(k, exhibit)
            text = (
                f"{row.name} exceeds the reference by {number(k)} x {full}{said}: the bias is "
                f"added {'before the reduction, once per rank' if k > 0 else 'too rarely'}"
            )
            return cause(
                "additive", text, residual=exhibit.multiple(row, left), factor=k,
                tensors=[row.name, full, *affected(exhibit)], ranks=row.ranks,
            )  # fmt: skip
    return None


def _is_added_often(k: float, exhibit: Exhibit) -> bool:
    """Say whether `1 + k` is a number of times: that of some ranks, one part of them, or none."""
    most = math.prod(exhibit.axes.values())
    ratio = Fraction(1.0 + k).limit_denominator(most)
    is_near = abs(float(ratio) - 1.0 - k) < 1e-3
    return is_near and ratio != 1 and (ratio.denominator == 1 or ratio.numerator == 1)


def value_before(exhibit: Exhibit, name: str, initial: Tensor) -> Tensor:
    """Return a parameter as it is before the step, float64."""
    before = exhibit.step - 1
    if before >= 0 and exhibit.store.entry(before, "parameters", name) is not None:
        return exhibit.store.expected(before, "parameters", name).to(torch.float64)
    return initial.detach().to(torch.float64)


def _times_text(k: float, exhibit: Exhibit) -> str:
    """Say that a multiple is one less than an axis size."""
    axes = [axis for axis in exhibit.wide_axes if abs(k - (exhibit.axes[axis] - 1)) < 1e-3]
    return f" = (ranks of {' or '.join(axes)} - 1)" if axes else ""


def excess_of(exhibit: Exhibit, row: Row) -> Tensor | None:
    """Return candidate minus reference of a module output, sharded rows in place."""
    found = exhibit.assembled(row)
    return None if found is None else found - exhibit.reference(row)


def whole_factor(exhibit: Exhibit, row: Row) -> Cause | None:
    """`factor` on an output or the loss: `candidate = k x reference` on every rank."""
    excess, whole = excess_of(exhibit, row), exhibit.reference(row)
    if excess is None or not bool(whole.any()):
        return None
    if whole.numel() == 1 and exhibit.copies_differ(row):
        return None  # every rank has a number of its own
    k = 1.0 + float((excess * whole).sum() / whole.square().sum())
    left = left_by(excess, whole, k - 1.0)
    tolerance = 2.0 * exhibit.tolerance(row)
    said, axis = meaning(k, max(tolerance / float(whole.norm()), 1e-9), exhibit.axes)
    if left > tolerance * max(1.0, abs(k)) or (whole.numel() == 1 and not said):
        return None
    text = f"{row.name} is {number(k)} x the reference" + (f": {said}" if said else "")
    return cause(
        "factor", text, residual=exhibit.multiple(row, left), factor=k, axis=axis,
        tensors=[row.name, *affected(exhibit)], ranks=row.ranks,
    )  # fmt: skip


def additive_loss(exhibit: Exhibit, row: Row) -> Cause | None:
    """`additive` on the loss: ln(ranks of an axis), or a term that counts too often or not."""
    held, whole = exhibit.locals(row), float(exhibit.reference(row).reshape(-1)[0])
    if not held or exhibit.reference(row).numel() != 1:
        return None
    values = [float(local.reshape(-1)[0]) for local in held.values()]
    tolerance = 4.0 * exhibit.tolerance(row)
    excesses = [math.fsum(values) / len(values) - whole]
    if max(values) - min(values) > tolerance:
        excesses.append(values[0] - whole)
    for excess in excesses:
        for axis in exhibit.wide_axes:
            size = exhibit.axes[axis]
            if abs(excess - math.log(size)) <= tolerance:
                text = (
                    f"{row.name} exceeds the reference by ln {size} = {math.log(size):.6g}: "
                    f"every one of the {size} ranks of {axis} counts the whole vocabulary; the "
                    f"logits are Replicate where Shard(-1) is expected"
                )
                return cause(
                    "additive", text, tensors=[row.name, *affected(exhibit)], axis=axis,
                    ranks=row.ranks,
                )  # fmt: skip
        found = _counted_term(exhibit, row, excess, tolerance)
        if found is not None:
            return found
    return None


def _counted_term(exhibit: Exhibit, row: Row, excess: float, tolerance: float) -> Cause | None:
    """Say that a term of the loss counts 0, 1 / ranks, ranks, ... times instead of once."""
    for term in exhibit.terms:
        if abs(term.value) <= 4.0 * tolerance:
            continue
        times = 1.0 + excess / term.value
        said, axis = meaning(times, 2.0 * tolerance / abs(term.value), exhibit.axes)
        if not said or abs(times - 1.0) < 1e-6 or not _is_count(times, exhibit):
            continue
        reached = [name for name, g in term.gradients.items() if bool(g.any())]
        names = [name for name in affected(exhibit) if name in reached] or affected(exhibit)
        text = (
            f"{row.name} counts a term of the loss ({term.name} = {term.value:.6g}, which reaches "
            f"{listed(names)}) {number(times)} times instead of once: {said}"
        )
        tensors = [row.name, *names]
        return cause("additive", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _is_count(times: float, exhibit: Exhibit) -> bool:
    """Say whether a term may count so often: one number is close to some fraction anyway."""
    most = max(8, math.prod(exhibit.axes.values()))
    ratio = Fraction(times).limit_denominator(most)
    return abs(ratio.numerator) <= most


def explained(exhibit: Exhibit, row: Row) -> str | None:
    """Say how a differing output is right after all, None where nothing explains it.

    A summand of a reduction is; so is a value without rows (a loss) of this rank's part.
    """
    found = partial_over(exhibit, row)
    if found is not None:
        return f"{found[1]} over {', '.join(found[0])} equals the reference"
    if rows_found(exhibit, row):
        return "its rows are rows of the single-device output"
    held = exhibit.locals(row)
    whole = tuple(row.shape)
    is_whole = bool(held) and all(tuple(local.shape) == whole for local in held.values())
    if is_whole and is_own_part(exhibit, row) and not _has_rows(exhibit, whole):
        return "it is that of this rank's part of the batch"
    return None


def rows_found(exhibit: Exhibit, row: Row) -> bool:
    """Say whether all slices of the ranks' outputs are slices of the reference's, in any order.

    Several calls of the module, on either side, are slices one after the other.
    """
    base = row.name.partition("#")[0]
    calls = [r for r in exhibit.stage_rows(row.stage) if r.name.partition("#")[0] == base]
    wholes = [exhibit.reference(r) for r in calls]
    held = exhibit.called(row.stage, base)
    parts = [local for r in held for local in r.values()]
    if len(held) == len(wholes) == 1:
        parts = list(_joined(exhibit, held[0], wholes[0]).values())
    if not parts or wholes[0].ndim == 0:
        return False
    tolerance = 4.0 * max(exhibit.tolerance(r) for r in calls)
    callers = {at for held in exhibit.called(row.stage, base) for at in held}
    is_everywhere = len(callers) == len(exhibit.dump.ranks)
    for dim in range(wholes[0].ndim):
        shapes = {_without(value.shape, dim) for value in [*wholes, *parts]}
        if len(shapes) > 1 or len({value.ndim for value in [*wholes, *parts]}) > 1:
            continue
        right, left = (torch.cat([v.movedim(dim, 0).flatten(1) if v.ndim > 1 else v[:, None]
                                  for v in values]) for values in (wholes, parts))  # fmt: skip
        if max(len(right), len(left)) > MOST_SLICES:
            continue
        near = torch.cdist(left, right)
        is_known = float(near.min(dim=1).values.max()) <= tolerance
        # A slice that no rank has is wrong too, unless some ranks did not call the module.
        is_covered = float(near.min(dim=0).values.max()) <= tolerance or not is_everywhere
        if is_known and is_covered:
            return True
    return False


def _joined(
    exhibit: Exhibit, held: Mapping[Coordinate, Tensor], whole: Tensor
) -> Mapping[Coordinate, Tensor]:
    """Return the ranks' outputs with samples that an axis cuts put together again."""
    for axis in sample_axes(exhibit) if len(exhibit.wide_axes) > 1 and whole.ndim else ():
        lines = exhibit.lines(axis, held)
        sizes = [sum(held[at].shape[0] for at in line if held[at].ndim) for line in lines]
        others = {tuple(held[at].shape[1:]) for at in held}
        if lines and set(sizes) == {whole.shape[0]} and len(others) == 1:
            held = {line[0]: torch.cat([held[at] for at in line]) for line in lines}
            break
    return held


def sample_axes(exhibit: Exhibit) -> list[str]:
    """Return the axes whose ranks train on other samples, also by `input_sharding()`."""
    seen = {at: tuple(exhibit.seen.samples(at)) for at in exhibit.part_batches}
    return [
        axis
        for axis in exhibit.wide_axes
        if exhibit.is_data_axis(axis)
        or any(len({seen[at] for at in line}) > 1 for line in exhibit.lines(axis, seen))
    ]


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return sizes without one dim."""
    return (*shape[:dim], *shape[dim + 1 :])


def _has_rows(exhibit: Exhibit, shape: tuple[int, ...]) -> bool:
    """Say whether a shape has the samples of the batch."""
    return bool(shape) and exhibit.case.batch_size in shape
