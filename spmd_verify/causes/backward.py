"""Causes in backward alone: gradients that a rank keeps to itself where a sum over ranks is due.

Forward is right, so each hypothesis is a run on one device in which the gradient at boundaries of
modules is what it would be on the ranks. What is said holds where all numbers of a gradient agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import sample_axes
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
from spmd_verify.causes.words import cause, listed
from spmd_verify.layouts import Coordinate, take_region
from spmd_verify.norms import as_real
from spmd_verify.record import ROOT, Cause, Row

# Each costs a step of one device per rank of the axis.
_MOST_TRIED: Final = 24
# Elements of gradients that are kept for the next tensor.
_MOST_KEPT: Final = 1 << 20
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
    for split, dim in itertools.islice(_gathers(exhibit, row), _MOST_TRIED):
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
    data = sample_axes(exhibit)
    for name in places:
        for axis in exhibit.wide_axes:
            # Samples are cut along the first dim, what belongs to a sample along another.
            first, last = (0, 1) if axis in data else (1, min(len(root.shape) - 1, 3))
            for dim in range(first, last):
                yield _Split(axis, [(ROOT, OUT)], dim, [(name, OUT)]), dim


# Of a change to a gradient: a name for it, and the change.
_Done = tuple[str, Change]


def _run(exhibit: Exhibit, changes: dict[Side, _Done]) -> dict[str, Tensor]:
    """Return all gradients with others at some boundaries; none where it cannot be run."""
    key = tuple((side, name) for side, (name, _) in changes.items())
    kept = exhibit.runs.kept
    if key not in kept:
        within = gradients_changed({side: change for side, (_, change) in changes.items()})
        record = exhibit.runs.record(exhibit.batch, within=within)
        known = {} if record is None else record["gradients"]
        kept[key] = {n: as_real(value).to(torch.float64) for n, value in known.items()}
        if sum(value.numel() for value in kept[key].values()) > _MOST_KEPT:
            return kept.pop(key)
    return kept[key]


def _part(sides: Sequence[Side], rank: int, size: int, dim: int) -> dict[Side, _Done]:
    """Return what leaves one rank's part of gradients."""
    return dict.fromkeys(sides, (f"part {rank} of {size}, {dim}", part_of(rank, size, dim)))


def _own_share(exhibit: Exhibit, row: Row, split: _Split) -> Cause | None:
    """Say that each rank goes on with the gradient of its own columns alone."""
    size = exhibit.axes[split.axis]
    runs = [_run(exhibit, _part(split.at, rank, size, split.dim)) for rank in range(size)]
    names = [r.name for r in exhibit.mismatches("gradients") if _has_share(exhibit, r, split, runs)]
    if row.name not in names:
        return None
    modules = listed([path for path, _ in split.at])
    text = (
        f"{listed(names)}: the gradient that passes backward through each rank's own columns of "
        f"{modules} only: the all-reduce over {split.axis} of the gradient at the "
        f"{side_text(split.before[0])} is missing"
    )
    return _cause(row, names, text, split.axis)


def _has_share(
    exhibit: Exhibit, row: Row, split: _Split, runs: Sequence[dict[str, Tensor]]
) -> bool:
    """Say whether the ranks hold their shares of a gradient, or the mean or sum of them."""
    shares = [run[row.name] for run in runs if row.name in run]
    whole = exhibit.reference(row)
    if len(shares) < len(runs):
        return False
    if all(float((share - whole).norm()) <= exhibit.tolerance(row) for share in shares):
        return False
    index = list(exhibit.axes).index(split.axis)
    if _are_held(exhibit, row, {at: shares[at[index]] for at in exhibit.locals(row)}):
        return True
    total = torch.stack(shares).sum(0)
    is_seen = not exhibit.copies_differ(row)
    return is_seen and any(is_close(exhibit, row, v) for v in (total, total / len(shares)))


def _other_axis(exhibit: Exhibit, row: Row, split: _Split) -> Cause | None:
    """Say that the gradient of a rank's own columns is added up over another axis."""
    index, size = list(exhibit.axes).index(split.axis), exhibit.axes[split.axis]
    for other in exhibit.wide_axes:
        if other == split.axis:
            continue
        added = (f"added over {other}", partial(_added_up, exhibit.axes[other]))
        mixed = dict.fromkeys(split.before, added)
        runs = [_run(exhibit, {**_part(split.at, rank, size, split.dim), **mixed})
                for rank in range(size)]  # fmt: skip
        names = [
            r.name
            for r in exhibit.mismatches("gradients")
            if all(r.name in run for run in runs)
            and _are_held(exhibit, r, {at: runs[at[index]][r.name] for at in exhibit.locals(r)})
        ]
        if row.name not in names:
            continue
        text = (
            f"{listed(names)}: the gradient at the {side_text(split.before[0])} is added up over "
            f"{other} instead of {split.axis}: the all-reduce uses the group of the other axis"
        )
        return _cause(row, names, text, split.axis)
    return None


def _added_up(size: int, value: Tensor) -> Tensor:
    """Return the sum of equal parts of the batch in the place of each."""
    parts = value.chunk(size)
    if len({part.shape for part in parts}) > 1:
        return value
    return torch.cat([torch.stack(parts).sum(0)] * len(parts))


def _own_slice(exhibit: Exhibit, row: Row, split: _Split, dim: int) -> Cause | None:
    """Say that backward of a gather keeps what a rank itself has made of its own part."""
    size = exhibit.axes[split.axis]
    pairs = []
    for rank in range(size):
        columns = _part(split.at, rank, size, split.dim)
        sliced = _part(split.before, rank, size, dim)
        pairs.append((_run(exhibit, columns), _run(exhibit, {**columns, **sliced})))
    names = [r.name for r in exhibit.mismatches("gradients") if _is_sliced(exhibit, r, pairs)]
    if row.name not in names:
        return None
    text = (
        f"{listed(names)}: where the {side_text(split.before[0])} is gathered over {split.axis} "
        f"(dim {dim}), backward keeps each rank's own gradient of its own part, and drops what the "
        f"other ranks have for it: a reduce-scatter is due, not a slice (or a gather that autograd "
        f"does not follow)"
    )
    return _cause(row, names, text, split.axis)


def _is_sliced(
    exhibit: Exhibit, row: Row, pairs: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> bool:
    """Say whether a gradient lacks what pairs of runs, whole and sliced, differ by."""
    whole = exhibit.reference(row)
    found = whole.clone()
    for some, kept in pairs:
        if row.name not in some or row.name not in kept:
            return False
        # Gradients are linear in what reaches the boundaries: only that path is another.
        found += kept[row.name] - some[row.name]
    is_other = float((found - whole).norm()) > exhibit.tolerance(row)
    return is_other and is_close(exhibit, row, found) and not exhibit.copies_differ(row)


def _are_held(exhibit: Exhibit, row: Row, due: dict[Coordinate, Tensor]) -> bool:
    """Say whether every rank holds its part of a tensor of its own."""
    tolerance = 4.0 * exhibit.tolerance(row)
    for at, local in exhibit.locals(row).items():
        part = exhibit.region(row, at)
        if part is None or part.shape != tuple(local.shape):
            return False
        if float((local - take_region(due[at], part)).norm()) > tolerance:
            return False
    return bool(due)


def _cause(row: Row, names: list[str], text: str, axis: str) -> Cause:
    """Return the cause of the gradients that are explained."""
    return cause("missing_reduction", text, tensors=names, axis=axis, ranks=row.ranks)
