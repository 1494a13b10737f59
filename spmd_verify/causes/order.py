"""Causes in which values of forward stand in another order, found by doing so on one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected
from spmd_verify.causes.interventions import (
    IN,
    OUT,
    Side,
    are_gradients_held,
    as_it_is,
    gradients_changed,
    in_order,
    is_held,
    is_loss_held,
    outputs_changed,
    side_text,
)
from spmd_verify.causes.patterns import MOST_SLICES, order_text, slice_order
from spmd_verify.causes.words import cause, names_of, rows_text
from spmd_verify.record import Cause, Row

# Micro-batches that a batch is cut into: every order of few is tried, of many only turns.
_MOST_PIECES: Final = 8
_FEW_PIECES: Final = 4
# Boundaries behind a module that are tried: what lies between is no module.
_MOST_BEHIND: Final = 2
# Rows with fewer elements are multiples of one another by chance.
_FEWEST_COLUMNS: Final = 3


def rows_before(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: an earlier output has its rows in another order, and this is computed from it."""
    rows = exhibit.stage_rows("module_outputs")
    names = [r.name for r in rows]
    end = names.index(row.name) if row.name in names else len(rows)
    for before in reversed(rows[:end]):
        found, whole = exhibit.assembled(before), exhibit.reference(before)
        if found is None or found.ndim < 2 or found.shape != whole.shape:
            continue
        tolerance = exhibit.tolerance(before)
        for dim in range(found.ndim - 1):
            order = slice_order(found, whole, dim, tolerance)
            if order is None:
                continue
            index = torch.tensor(order)
            change = partial(torch.index_select, dim=dim, index=index)
            path = before.name.partition("#")[0]
            record = exhibit.runs.record(exhibit.batch, within=outputs_changed({path: change}))
            if not is_held(exhibit, row, record):
                continue
            text = (
                f"{before.name} is the reference with the slices of dim {dim} in another order: "
                f"{order_text(order)}; {row.name} is what one device computes from them as they "
                f"stand: they were moved, and not put back"
            )
            tensors = [before.name, row.name, *affected(exhibit)]
            return cause("layout", text, tensors=tensors, ranks=row.ranks)
    return None


def rows_weighted(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: every row is a multiple of one of the reference's, by a weight of another row.

    Weights that change places give factors whose product is 1.
    """
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.ndim < 2 or found.shape != whole.shape:
        return None
    left, right = found.flatten(0, -2), whole.flatten(0, -2)
    count, width = left.shape
    if not 2 < count <= MOST_SLICES or width < _FEWEST_COLUMNS:
        return None
    tolerance = 4.0 * exhibit.tolerance(row)
    order = _nearest(left, right, tolerance)
    if order is None:
        return None
    matched = right[torch.tensor(order)]
    power = matched.square().sum(1)
    factors = (left * matched).sum(1) / power.clamp(min=1e-300)
    kept = power.sqrt() > tolerance
    off = float((left - factors[:, None] * matched).norm())
    if off > tolerance * max(1.0, float(factors.abs().max())) or not bool(kept.all()):
        return None
    product = float(factors.abs().log().sum())
    noise = float((tolerance / power.sqrt()).sum()) + 1e-9
    moved = [i for i, k in enumerate(factors.tolist()) if abs(k - 1.0) > 1e-3]
    if len(moved) < 2 or abs(product) > noise or bool((factors <= 0).any()):
        return None
    low, high = float(factors.min()), float(factors.max())
    rearranged = [i for i, j in enumerate(order) if i != j]
    what = f"rows {rows_text(moved)} of {count} are {low:.4g} to {high:.4g} x the reference's"
    if rearranged:
        what += f", in another order ({order_text(order)})"
    text = (
        f"{row.name}: {what}, and the factors multiply to 1: rows meet the weights of other rows; "
        f"only one of the two was sorted, or put back"
    )
    return cause("layout", text, tensors=[row.name, *affected(exhibit)], ranks=row.ranks)


def _nearest(left: Tensor, right: Tensor, tolerance: float) -> list[int] | None:
    """Return, for every row, the row of the other that it is a multiple of; its own first."""
    units = [value / value.norm(dim=1, keepdim=True).clamp(min=1e-300) for value in (left, right)]
    alike = units[0] @ units[1].T
    order: list[int] = []
    free = set(range(len(left)))
    for i in range(len(left)):
        best = int(alike[i].argmax())
        # One that fits as well as the best stays where it is.
        power = float(right[i].square().sum())
        k = float((left[i] * right[i]).sum()) / power if power else 0.0
        if i in free and float((left[i] - k * right[i]).norm()) <= tolerance * max(1.0, abs(k)):
            best = i
        if best not in free:
            return None
        free.discard(best)
        order.append(best)
    return order


def labels_of_others(exhibit: Exhibit, row: Row) -> Cause | None:
    """`inputs`: one argument of the batch meets the others in another order.

    Only where forward is right: what forward gets is compared as it is.
    """
    if exhibit.mismatches("module_outputs") or exhibit.is_chance_open:
        return None
    size = exhibit.case.batch_size
    leaves, structure = pytree.tree_flatten(exhibit.batch)
    # The last is a label more often than the first.
    for at, leaf in reversed([*enumerate(leaves)]):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != size:
            continue
        for order in _orders(size):
            change = in_order(order)
            moved = change(leaf)
            if torch.equal(moved, leaf):
                continue
            batch = structure.unflatten([*leaves[:at], moved, *leaves[at + 1 :]])
            record = exhibit.runs.record(batch, within=as_it_is)
            is_same = record is not None and is_loss_held(exhibit, row, record)
            if not is_same or not are_gradients_held(exhibit, record):
                continue
            name = _leaf_name(exhibit.batch, at)
            text = (
                f"{name} meets the rest of the batch in another order: loss and gradients are "
                f"those of one device with its {len(order)} blocks of {size // len(order)} samples "
                f"as {', '.join(map(str, order))}: labels of another micro-batch or rank"
            )
            tensors = [row.name, *affected(exhibit)]
            return cause("inputs", text, tensors=tensors, ranks=row.ranks)
    return None


def _leaf_name(batch: Any, at: int) -> str:
    """Return how an argument of the batch is called."""
    paths = pytree.tree_flatten_with_path(batch)[0]
    return f"argument {pytree.keystr(paths[at][0])} of the batch"


def _orders(size: int) -> Iterator[tuple[int, ...]]:
    """Give the orders of equal blocks of a batch, few blocks first."""
    for pieces in range(2, min(size, _MOST_PIECES) + 1):
        if size % pieces:
            continue
        straight = tuple(range(pieces))
        if pieces <= _FEW_PIECES:
            yield from (o for o in itertools.permutations(straight) if o != straight)
            continue
        yield tuple(reversed(straight))
        for turn in range(1, pieces):
            yield tuple((i + turn) % pieces for i in straight)


def gradients_of_others(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: backward of a micro-batch starts from the gradient of another one.

    The gradients of a module are bilinear in its blocks of the batch and the gradients that
    reach them: every pair of blocks is run, and how often each counts is fitted.
    """
    path = row.name.rpartition(".")[0]
    size = exhibit.case.batch_size
    places = list(_places_behind(exhibit, path, size))
    if not places or exhibit.is_chance_open:
        return None
    rows = [r for r in exhibit.mismatches("gradients") if r.name.rpartition(".")[0] == path]
    values = [exhibit.assembled(r) for r in rows]
    if any(value is None for value in values) or any(map(exhibit.copies_differ, rows)):
        return None
    found = torch.cat([value.reshape(-1) for value in values if value is not None])
    for place, pieces in itertools.product(places, range(2, min(size, _MOST_PIECES) + 1)):
        if size % pieces or 2 * pieces**2 > found.numel():
            continue
        met = _met(exhibit, place, rows, pieces, found)
        if met is None:
            continue
        said = ", ".join(f"those of {i} the gradient of {j}" for i, j in enumerate(met) if i != j)
        text = (
            f"backward in front of the {side_text(place)} has the micro-batches' gradients in "
            f"another order: of {pieces} blocks of the batch, activations meet {said}"
        )
        names = names_of([*rows, *exhibit.mismatches("gradients")])
        return cause("layout", text, tensors=names, ranks=row.ranks)
    return None


def _places_behind(exhibit: Exhibit, path: str, size: int) -> Iterator[Side]:
    """Give the boundaries behind a module at which there is a row per sample."""
    rows = [r for r in exhibit.stage_rows("module_outputs") if "#" not in r.name]
    names = [r.name for r in rows]
    if path not in names:
        return
    at = names.index(path)
    if rows[at].shape and rows[at].shape[0] == size:
        yield path, OUT
        yield from ((name, IN) for name in names[at + 1 : at + 1 + _MOST_BEHIND])


def _met(
    exhibit: Exhibit, place: Side, rows: Sequence[Row], pieces: int, found: Tensor
) -> list[int] | None:
    """Return whose gradient each block of the batch met; None where they do not explain it."""
    columns = []
    for at, of in itertools.product(range(pieces), repeat=2):
        change = partial(_moved_block, pieces, at, of)
        record = exhibit.runs.record(exhibit.batch, within=gradients_changed({place: change}))
        if record is None or any(r.name not in record["gradients"] for r in rows):
            return None
        columns.append(torch.cat([record["gradients"][r.name].reshape(-1) for r in rows]))
    matrix = torch.stack(columns, 1)
    solved = torch.linalg.lstsq(matrix, found[:, None], driver="gelsd").solution[:, 0]
    counts = solved.reshape(pieces, pieces).round()
    is_order = bool((counts.sum(0) == 1).all() and (counts.sum(1) == 1).all())
    if not is_order or bool((counts < 0).any()):
        return None
    left = float((matrix @ counts.reshape(-1) - found).norm())
    noise = math.sqrt(sum((4.0 * exhibit.tolerance(r)) ** 2 for r in rows))
    met = counts.argmax(1).tolist()
    return met if met != list(range(pieces)) and left <= noise else None


def _moved_block(pieces: int, at: int, of: int, value: Tensor) -> Tensor:
    """Return one block of a gradient in the place of another, zeros elsewhere."""
    blocks = [torch.zeros_like(block) for block in value.chunk(pieces)]
    blocks[at] = value.chunk(pieces)[of]
    return torch.cat(blocks)
