"""Causes in which tensors meet others, or other operations, than on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.gradients import is_own, left_by, part_gradients
from spmd_verify.causes.patterns import before_step
from spmd_verify.causes.words import cause, listed, names_of, owners_of, ranks_text
from spmd_verify.layouts import take_region
from spmd_verify.record import Cause, Row

# Fewer elements fit other tensors by chance.
_FEWEST_ELEMENTS: Final = 4
# What a collective may compute instead of a sum.
_OPERATIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "MAX": torch.amax,
    "MIN": torch.amin,
    "PRODUCT": torch.prod,
}


def exchanged(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: a tensor is that of another parameter of the same shape, or a sum with it."""
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if found is None or found.numel() < _FEWEST_ELEMENTS:
        return None
    for what, own, right, others in _compared(exhibit, row, found, whole):
        for other, value in others:
            if float((own - value).norm()) <= 2.0 * exhibit.tolerance(row):
                text = (
                    f"the {what} of {row.name} is that of {other}: tensors of one shape change "
                    f"places, where they are packed, gathered or handed out in another order"
                )
                return _cause(exhibit, row, text, other)
            # Parameters may follow others, by right: an average of weights does.
            k = _sum_of_both(exhibit, row, own, right, value) if what == "gradient" else None
            if k is not None:
                text = (
                    f"the gradient of {row.name} is {k:.4g} x the sum of its own and that of "
                    f"{other}: different parameters meet in one reduction over "
                    f"{', '.join(exhibit.wide_axes)}"
                )
                return _cause(exhibit, row, text, other)
    return None


def _cause(exhibit: Exhibit, row: Row, text: str, other: str) -> Cause:
    """Return the cause for a tensor and the other that it met."""
    wrong = names_of(exhibit.mismatches(row.stage))
    names = [row.name, *([other] if other in wrong else [])]
    if row.stage == "optimizer_state":
        names += owners_of([*names, *wrong])
    return cause("layout", text, tensors=names, ranks=row.ranks)


def _compared(
    exhibit: Exhibit, row: Row, found: Tensor, whole: Tensor
) -> Iterator[tuple[str, Tensor, Tensor, list[tuple[str, Tensor]]]]:
    """Give `(what, own, right, [(name, value of another tensor of the shape)])`."""
    key = row.name.rpartition(".")[2]
    alike = [
        r
        for r in exhibit.stage_rows(row.stage)
        if r.name != row.name and r.shape == row.shape
        and (row.stage != "optimizer_state" or r.name.rpartition(".")[2] == key)
    ]  # fmt: skip
    what = {"gradients": "gradient", "parameters": "value"}.get(row.stage, "state")
    yield what, found, whole, [(r.name, exhibit.reference(r)) for r in alike]
    before = before_step(exhibit, row) if row.stage == "parameters" else None
    if before is None:
        return
    moves = []
    for r in alike:
        start = before_step(exhibit, r)
        if start is not None:
            moves.append((r.name, exhibit.reference(r) - start))
    yield "update", found - before, whole - before, moves


def _sum_of_both(
    exhibit: Exhibit, row: Row, own: Tensor, right: Tensor, other: Tensor
) -> float | None:
    """Return how its own and another tensor count in one, both alike; None where they do not."""
    both = right + other
    power = float(both.square().sum())
    k = float((own * both).sum()) / power if power else 0.0
    tolerance = 2.0 * exhibit.tolerance(row) * max(1.0, abs(k))
    is_seen = abs(k) * float(other.norm()) > 2.0 * tolerance
    return k if is_seen and left_by(own, both, k) <= tolerance else None


def reduced_to_some(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: some ranks have the reduced gradient, the others only their own."""
    right = _right_ranks(exhibit, row)
    rest = [at for at in exhibit.locals(row) if exhibit.rank_of(at) not in right]
    if not right or not rest or not is_own(exhibit, row, rest):
        return None
    rows = [r for r in exhibit.mismatches(row.stage) if _right_ranks(exhibit, r) == right]
    names = names_of(rows)
    others = [exhibit.rank_of(at) for at in rest]
    text = (
        f"{listed(names)}: reduced on {ranks_text(right)} only; {ranks_text(others)} "
        f"{'has' if len(others) == 1 else 'have'} the gradient of their own data: the result is "
        f"not sent to them"
    )
    return cause("missing_reduction", text, tensors=names, ranks=sorted(others))


def _right_ranks(exhibit: Exhibit, row: Row) -> list[int]:
    """Return the ranks whose part is the reference's."""
    held, whole, tolerance = exhibit.locals(row), exhibit.reference(row), exhibit.tolerance(row)
    return [
        exhibit.rank_of(at)
        for part, coordinates in exhibit.regions(row).items()
        for at in coordinates
        if float((held[at] - take_region(whole, part)).norm()) <= 4.0 * tolerance
    ]


def other_operation(exhibit: Exhibit, row: Row) -> Cause | None:
    """`missing_reduction`: the ranks' gradients are reduced, but not summed."""
    name = _operation(exhibit, row)
    if name is None:
        return None
    names = names_of(r for r in exhibit.mismatches(row.stage) if _operation(exhibit, r) == name)
    text = (
        f"{listed(names)}: the {name} of the ranks' gradients over "
        f"{', '.join(exhibit.wide_axes)}, element by element, instead of their sum"
    )
    return cause("missing_reduction", text, tensors=names, ranks=row.ranks)


def _operation(exhibit: Exhibit, row: Row) -> str | None:
    """Return which operation on the ranks' gradients gives the tensor, if one does."""
    found = exhibit.assembled(row)
    if found is None or found.numel() < _FEWEST_ELEMENTS or exhibit.copies_differ(row):
        return None
    parts = part_gradients(exhibit, row)
    if len(parts) < 2:
        return None
    for name, operation in _OPERATIONS.items():
        made = operation(torch.stack(parts), 0)
        power = float(made.square().sum())
        k = float((found * made).sum()) / power if power else 0.0
        if k and left_by(found, made, k) <= 4.0 * exhibit.tolerance(row) * max(1.0, abs(k)):
            return name
    return None
