"""Causes in backward alone: gradients that a rank keeps to itself where a sum over ranks is due.

Forward is right, so each hypothesis is a run on one device in which the gradient at boundaries of
modules is what it would be on the ranks. What is said holds where all numbers of a gradient agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.interventions import (
    IN,
    OUT,
    Change,
    Side,
    gradients_changed,
    is_close,
    part_of,
    side_text,
)
from spmd_verify.causes.words import cause, listed, names_of
from spmd_verify.layouts import take_region
from spmd_verify.norms import as_real
from spmd_verify.record import ROOT, Cause, Row

# Each costs a step of one device per rank of the axis.
_MOST_TRIED: Final = 24
# Fewer numbers fit a hypothesis by chance.
_FEWEST_ELEMENTS: Final = 4


@dataclass(frozen=True)
class _Split:
    """Modules whose outputs the ranks of an axis have parts of.

    Attributes:
        axis: Of the mesh.
        at: Where the gradient of a rank is only its part, the others zero.
        dim: Of that gradient.
        before: Boundaries in front of it, at which the ranks' gradients are to be added up.
    """

    axis: str
    at: Sequence[Side]
    dim: int
    before: Sequence[Side]


def kept_gradient(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: gradients that the ranks should add up are each rank's own."""
    if exhibit.mismatches("module_outputs") or exhibit.is_chance_open:
        return None
    if exhibit.reference(row).numel() < _FEWEST_ELEMENTS:
        return None
    for split in _column_splits(exhibit):
        found = _own_share(exhibit, row, split) or _other_axis(exhibit, row, split)
        if found is not None:
            return found
    tried = 0
    for split, dim in _gathers(exhibit, row):
        tried += 1
        if tried > _MOST_TRIED:
            break
        found = _own_slice(exhibit, row, split, dim)
        if found is not None:
            return found
    return None


def _column_splits(exhibit: Exhibit) -> Iterator[_Split]:
    """Give the modules around one another whose weights are cut by rows: columns of outputs."""
    for axis in exhibit.wide_axes:
        groups: dict[str, list[str]] = {}
        for parameter in exhibit.stage_rows("parameters"):
            path, _, last = parameter.name.rpartition(".")
            if last == "weight" and len(parameter.shape) == 2 and _is_cut(exhibit, parameter, axis):
                groups.setdefault(path.rpartition(".")[0], []).append(path)
        for paths in groups.values():
            at, before = [(path, OUT) for path in paths], [(path, IN) for path in paths]
            yield _Split(axis, at, -1, before)


def _is_cut(exhibit: Exhibit, row: Row, axis: str) -> bool:
    """Say whether the ranks of an axis hold other rows, and whole ones, of a parameter."""
    line = next(iter(exhibit.lines(axis, exhibit.locals(row))), [])
    parts = [exhibit.region(row, at) for at in line]
    shapes = {part.shape for part in parts if part is not None}
    is_whole = all(shape[1:] == tuple(row.shape[1:]) for shape in shapes)
    return None not in parts and len(set(parts)) == len(line) > 1 and is_whole


def _gathers(exhibit: Exhibit, row: Row) -> Iterator[tuple[_Split, int]]:
    """Give the ways in which something may be gathered, and the dim along which it was cut."""
    for split in _column_splits(exhibit):
        for dim in range(2):
            yield split, dim
    rows = [r for r in exhibit.stage_rows("module_outputs") if "#" not in r.name]
    root = next((r for r in rows if r.name == ROOT), None)
    if root is None or len(root.shape) < 2:
        return
    owner = row.name.rpartition(".")[0]
    places = [r.name for r in rows if r.name != ROOT and len(r.shape) > 1]
    # The gradient of a module's parameters is first wrong where its own output is gathered.
    places.sort(key=lambda name: name != owner)
    for name in places:
        for axis in exhibit.wide_axes:
            for dim in range(min(len(root.shape) - 1, 2))[::-1]:
                yield _Split(axis, [(ROOT, OUT)], dim, [(name, OUT)]), dim


def _run(exhibit: Exhibit, row: Row, changes: dict[Side, Change]) -> Tensor | None:
    """Return a gradient with others at some boundaries."""
    record = exhibit.runs.record(exhibit.batch, within=gradients_changed(changes))
    value = None if record is None else record["gradients"].get(row.name)
    return None if value is None else as_real(value).to(torch.float64)


def _shares(exhibit: Exhibit, row: Row, split: _Split) -> list[Tensor] | None:
    """Return the gradient with each rank's part alone; None where that cannot be run."""
    found = []
    size = exhibit.axes[split.axis]
    for rank in range(size):
        value = _run(exhibit, row, dict.fromkeys(split.at, part_of(rank, size, split.dim)))
        if value is None:
            return None
        found.append(value)
    return found


def _own_share(exhibit: Exhibit, row: Row, split: _Split) -> Cause | None:
    """Say that each rank goes on with the gradient of its own columns alone."""
    shares = _shares(exhibit, row, split)
    whole = exhibit.reference(row)
    if shares is None or all(float((s - whole).norm()) <= exhibit.tolerance(row) for s in shares):
        return None
    index = list(exhibit.axes).index(split.axis)
    held = exhibit.locals(row)
    total = torch.stack(shares).sum(0)
    is_own = _are_held(exhibit, row, {at: shares[at[index]] for at in held})
    if not is_own and not is_close(exhibit, row, total / len(shares)):
        if not is_close(exhibit, row, total):
            return None
    modules = listed([path for path, _ in split.at])
    text = (
        f"{row.name} has the gradient that passes backward through each rank's own columns of "
        f"{modules} only: the all-reduce over {split.axis} of the gradient at the "
        f"{side_text(split.before[0])} is missing"
    )
    return _cause(exhibit, row, text, split.axis)


def _other_axis(exhibit: Exhibit, row: Row, split: _Split) -> Cause | None:
    """Say that the gradient of a rank's own columns is added up over another axis."""
    index, size = list(exhibit.axes).index(split.axis), exhibit.axes[split.axis]
    for other in exhibit.wide_axes:
        if other == split.axis:
            continue
        mixed = dict.fromkeys(split.before, partial(_added_up, exhibit.axes[other], 0))
        shares: list[Tensor] = []
        for rank in range(size):
            columns = dict.fromkeys(split.at, part_of(rank, size, split.dim))
            value = _run(exhibit, row, {**columns, **mixed})
            if value is None:
                return None
            shares.append(value)
        if not _are_held(exhibit, row, {at: shares[at[index]] for at in exhibit.locals(row)}):
            continue
        text = (
            f"{row.name} has the gradient at the {side_text(split.before[0])} added up over "
            f"{other} instead of {split.axis}: the all-reduce uses the group of the other axis"
        )
        return _cause(exhibit, row, text, split.axis)
    return None


def _added_up(size: int, dim: int, value: Tensor) -> Tensor:
    """Return the sum of equal parts in the place of each."""
    parts = value.chunk(size, dim)
    if len({part.shape for part in parts}) > 1:
        return value
    return torch.cat([torch.stack(parts).sum(0)] * len(parts), dim)


def _own_slice(exhibit: Exhibit, row: Row, split: _Split, dim: int) -> Cause | None:
    """Say that backward of a gather keeps what a rank itself has made of its own part."""
    size = exhibit.axes[split.axis]
    found = exhibit.reference(row).clone()
    for rank in range(size):
        columns = dict.fromkeys(split.at, part_of(rank, size, split.dim))
        sliced = dict.fromkeys(split.before, part_of(rank, size, dim))
        some, kept = _run(exhibit, row, columns), _run(exhibit, row, {**columns, **sliced})
        if some is None or kept is None:
            return None
        # Gradients are linear in what reaches the boundaries: only that path is another.
        found += kept - some
    if float((found - exhibit.reference(row)).norm()) <= exhibit.tolerance(row):
        return None
    if not is_close(exhibit, row, found) or exhibit.copies_differ(row):
        return None
    text = (
        f"{row.name}: where the {side_text(split.before[0])} is gathered over {split.axis} (dim "
        f"{dim}), backward keeps each rank's own gradient of its own part, and drops what the "
        f"other ranks have for it: a reduce-scatter is due, not a slice (or a gather that autograd "
        f"does not follow)"
    )
    return _cause(exhibit, row, text, split.axis)


def _are_held(exhibit: Exhibit, row: Row, due: dict[tuple[int, ...], Tensor]) -> bool:
    """Say whether every rank holds its part of a tensor of its own."""
    tolerance = 4.0 * exhibit.tolerance(row)
    for at, local in exhibit.locals(row).items():
        part = exhibit.region(row, at)
        if part is None or part.shape != tuple(local.shape):
            return False
        if float((local - take_region(due[at], part)).norm()) > tolerance:
            return False
    return bool(due)


def _cause(exhibit: Exhibit, row: Row, text: str, axis: str) -> Cause:
    """Return the cause; what else differs lies in front of the same boundary."""
    names = names_of([row, *exhibit.mismatches("gradients")])
    return cause("missing_reduction", text, tensors=names, axis=axis, ranks=row.ranks)
