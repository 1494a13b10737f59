"""Causes that show on ranks > 0 or at shard borders: local indices instead of global ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import (
    affected,
    excess_of,
    is_own_part,
    module_of,
    sample_axes,
    value_before,
)
from spmd_verify.causes.words import cause, ranks_text, rows_text
from spmd_verify.layouts import take_region
from spmd_verify.record import Cause, Row


def position(exhibit: Exhibit, row: Row) -> Cause | None:
    """`position`: the first rank is right, later ones or boundary rows are wrong."""
    if exhibit.is_chance_open:
        return None
    held, whole = exhibit.locals(row), exhibit.reference(row)
    tolerance = 4.0 * exhibit.tolerance(row)
    regions = exhibit.regions(row)
    wrong: list[int] = []
    right: list[int] = []
    for part, coordinates in regions.items():
        local = held[coordinates[0]]
        if tuple(local.shape) != part.shape:
            return None
        off = float((local - take_region(whole, part)).norm()) > tolerance
        (wrong if off else right).extend(exhibit.rank_of(at) for at in coordinates)
    if wrong and right and min(right) == 0:
        rows = _rows_of(exhibit, row, regions, tolerance)
        over = ", ".join(_axes_that_tell(exhibit, wrong, right) or exhibit.wide_axes)
        why = f"positions, masks or offsets there are not the global ones, but local to {over}"
        if all(exhibit.is_data_axis(axis) for axis in exhibit.wide_axes):
            why = f"it depends on the rank, as an index or a label does that is local to {over}"
        text = (
            f"{row.name} is right on {ranks_text(right)} and wrong on {ranks_text(wrong)}{rows}: "
            f"{why}"
        )
        tensors = [row.name, *affected(exhibit)]
        return cause("position", text, tensors=tensors, ranks=sorted(wrong))
    if wrong and right and _is_along_sample(exhibit, regions):
        data = sample_axes(exhibit)
        over = ", ".join(axis for axis in exhibit.wide_axes if axis not in data)
        text = (
            f"{row.name} is right on {ranks_text(right)} and wrong on {ranks_text(wrong)}"
            f"{_rows_of(exhibit, row, regions, tolerance)}: positions or masks there belong to "
            f"another part of what {over} cuts"
        )
        tensors = [row.name, *affected(exhibit)]
        return cause("position", text, tensors=tensors, ranks=sorted(wrong))
    summed = _lookup_without_offset(exhibit, row, tolerance)
    summed = summed or _some_rows_of_sum(exhibit, row, tolerance)
    if summed is not None:
        return summed
    found = excess_of(exhibit, row)
    if found is None or found.ndim < 2:
        return None
    return _boundary(exhibit, row, found, tolerance)


def _axes_that_tell(exhibit: Exhibit, wrong: list[int], right: list[int]) -> list[str]:
    """Return the axes along which ranks are right here and wrong there."""
    places = {rank: at for at, rank in exhibit.dump.ranks.items()}
    found = []
    for i, axis in enumerate(exhibit.axes):
        bad, good = ({places[rank][i] for rank in ranks} for ranks in (wrong, right))
        if exhibit.axes[axis] > 1 and not bad & good:
            found.append(axis)
    return found


def _is_along_sample(exhibit: Exhibit, regions: dict) -> bool:
    """Say whether ranks have parts of the same samples: pieces of a dim between first and last."""
    ranges = [part.ranges for part in regions]
    dims = len(ranges[0]) if ranges else 0
    is_cut = any(len({each[dim] for each in ranges}) > 1 for dim in range(1, dims - 1))
    return is_cut and set(sample_axes(exhibit)) != set(exhibit.wide_axes)


def _lookup_without_offset(exhibit: Exhibit, row: Row, tolerance: float) -> Cause | None:
    """Say that every rank looks global indices up in its own rows as if they were local."""
    module = module_of(exhibit, row.name)
    weight = getattr(module, "weight", None)
    whole = exhibit.reference(row)
    first = next(iter(exhibit.locals(row).values()), None)
    if weight is None or weight.ndim != 2 or first is None or first.shape != whole.shape:
        return None
    if weight.shape[1] != whole.shape[-1]:
        return None  # no table whose rows are looked up
    path = row.name.partition("[")[0].partition("#")[0]
    table = value_before(exhibit, f"{path}.weight", weight)
    for ids in pytree.tree_leaves(exhibit.batch):
        if not isinstance(ids, Tensor) or ids.shape != whole.shape[:-1] or ids.is_floating_point():
            continue
        for axis in exhibit.wide_axes:
            parts = table.chunk(exhibit.axes[axis])
            made = torch.zeros_like(whole)
            for part in parts:
                inside = ids < part.shape[0]
                made += part[ids.clamp(max=part.shape[0] - 1)] * inside[..., None]
            if float((first - made).norm()) <= tolerance:
                text = (
                    f"{row.name}: every rank of {axis} looks indices up in its own {len(parts[0])} "
                    f"rows as if they were local: the offset of the vocabulary is missing on every "
                    f"rank but rank 0"
                )
                tensors = [row.name, *affected(exhibit)]
                return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _some_rows_of_sum(exhibit: Exhibit, row: Row, tolerance: float) -> Cause | None:
    """Say that the sum over an axis is right for some rows: a lookup with local offsets."""
    held, whole = exhibit.locals(row), exhibit.reference(row)
    if whole.ndim < 2 or any(local.shape != whole.shape for local in held.values()):
        return None
    for axis in exhibit.wide_axes:
        for line in exhibit.lines(axis, held):
            for value in (torch.stack([held[at] for at in line]).sum(0), held[line[0]]):
                off = (value - whole).flatten(0, -2).norm(dim=1) > tolerance
                if not bool(off.any()) or bool(off.all()):
                    continue
                text = (
                    f"{row.name}: what the ranks of {axis} look up is right for some indices and "
                    f"wrong for {int(off.sum())} of {off.numel()}: a rank other than rank 0 uses "
                    f"indices local to its shard instead of global ones (offset of the vocabulary)"
                )
                tensors = [row.name, *affected(exhibit)]
                return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def _rows_of(exhibit: Exhibit, row: Row, regions: dict, tolerance: float) -> str:
    """Return the wrong indices of the sharded dim in global coordinates.

    Of several dims that are cut the one is named of which some slices are right everywhere.
    """
    dims = [d for d in range(len(row.shape)) if len({part.ranges[d] for part in regions}) > 1]
    found = {dim: _wrong_of(exhibit, row, regions, tolerance, dim) for dim in dims}
    told = {dim: wrong for dim, wrong in found.items() if 0 < len(wrong) < row.shape[dim]}
    # A fault of one part shows in every dim that is cut: all are needed to say where.
    return " and".join(f" (indices {rows_text(sorted(w))} of dim {d})" for d, w in told.items())


def _wrong_of(exhibit: Exhibit, row: Row, regions: dict, tolerance: float, dim: int) -> set[int]:
    """Return the indices of a dim, global, at which some rank is wrong."""
    whole, held = exhibit.reference(row), exhibit.locals(row)
    wrong: set[int] = set()
    for part, coordinates in regions.items():
        error = (held[coordinates[0]] - take_region(whole, part)).movedim(dim, 0)
        sizes = error.reshape(error.shape[0], -1).norm(dim=1)
        indices = [i for low, high in part.ranges[dim] for i in range(low, high)]
        wrong.update(i for i, size in zip(indices, sizes.tolist(), strict=True) if size > tolerance)
    return wrong


def _boundary(exhibit: Exhibit, row: Row, excess: Tensor, tolerance: float) -> Cause | None:
    """Say that only slices next to a shard's end are wrong."""
    for dim in range(1, excess.ndim):
        size = excess.shape[dim]
        sizes = excess.movedim(dim, 0).reshape(size, -1).norm(dim=1)
        wrong = [int(i) for i in (sizes > tolerance).nonzero().flatten()]
        if not wrong or len(wrong) > size // 2:
            continue
        for axis in exhibit.wide_axes:
            step = -(-size // exhibit.axes[axis])
            edges = {i * step - 1 for i in range(1, exhibit.axes[axis])} | {
                i * step for i in range(1, exhibit.axes[axis])
            }
            if set(wrong) <= edges:
                text = (
                    f"{row.name} is wrong only at indices {rows_text(wrong)} of dim {dim}, the "
                    f"borders of the shards of {axis}: what crosses a border is lost"
                )
                tensors = [row.name, *affected(exhibit)]
                return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axis)
    return None


def shard_as_sequence(exhibit: Exhibit, row: Row) -> Cause | None:
    """`position`: each rank's loss takes its shard of the sequence for a whole one."""
    axes = [axis for axis in exhibit.wide_axes if not exhibit.is_data_axis(axis)]
    if not axes or not is_own_part(exhibit, row) or exhibit.weights is not None:
        return None
    over = ", ".join(axes)
    text = (
        f"{row.name}: each rank of {over} computes it as if its shard were the whole sequence: "
        f"labels, positions or masks that cross a shard border are lost"
    )
    tensors = [row.name, *affected(exhibit)]
    return cause("position", text, tensors=tensors, ranks=row.ranks, axis=axes[0])


def gradient_rows(exhibit: Exhibit, row: Row) -> Cause | None:
    """`position`: rows of a gradient that belong to ranks > 0 or to shard borders are wrong."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.ndim == 0:
        return None
    size = found.shape[0]
    tolerance = exhibit.tolerance(row)
    error = (found - whole).reshape(size, -1).norm(dim=1)
    wrong = [int(i) for i in (error > tolerance).nonzero().flatten()]
    if not wrong or len(wrong) == size:
        return None
    zero = [i for i in wrong if not bool(found[i].any()) and bool(whole[i].any())]
    extra = [i for i in wrong if bool(found[i].any()) and not bool(whole[i].any())]
    regions = exhibit.regions(row)
    owners = {
        exhibit.rank_of(at)
        for part, coordinates in regions.items()
        for at in coordinates
        if part.ranges and any(low <= i < high for i in wrong for low, high in part.ranges[0])
    }
    if not (zero or extra or (len(regions) > 1 and 0 not in owners)):
        return None
    said = [f"rows {rows_text(wrong)} of {size} are wrong"]
    if zero:
        said.append(f"rows {rows_text(zero)} never get their gradient")
    if extra:
        said.append(f"rows {rows_text(extra)} get one though one device gives them none")
    text = (
        f"{row.name}: {'; '.join(said)}: indices (positions, vocabulary or padding) are local "
        f"to a rank of {', '.join(exhibit.wide_axes)} instead of global"
    )
    return cause("position", text, tensors=[row.name], ranks=sorted(owners))
