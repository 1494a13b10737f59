"""A fused projection that is sharded as one matrix: `layout`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected
from spmd_verify.causes.interventions import in_order, parameters_changed
from spmd_verify.causes.words import cause
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row

# Gate and up; query, key and value; both of two branches.
_BLOCKS: Final = (2, 3, 4)
# Each costs one step of one device.
_MOST_RUNS: Final = 12


def fused_projection(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: rows of a fused weight are cut contiguously, then in blocks on every rank.

    What the ranks compute then is what one device computes with the blocks of the fused weight
    in another order; that is run and compared.
    """
    tested = witness(exhibit)
    if tested is None:
        return None
    candidates = list(_candidates(exhibit, row))[:_MOST_RUNS]
    for module, axis, blocks in candidates:
        order = _order(blocks, exhibit.axes[axis])
        change = in_order(order)
        names = [f"{module}.{each}" for each in ("weight", "bias")]
        record = exhibit.runs.record(
            exhibit.batch, within=parameters_changed(dict.fromkeys(names, change))
        )
        if record is None or not agrees(exhibit, tested, record[tested.stage].get(tested.name)):
            continue
        text = (
            f"{module} is a fused projection of {blocks} blocks, sharded over {axis} as one matrix "
            f"and cut in {blocks} on every rank: {tested.name} equals the reference with the rows "
            f"of {module}.weight in block order {', '.join(map(str, order))}"
        )
        return cause(
            "layout",
            text,
            axis=axis,
            ranks=row.ranks,
            tensors=list(dict.fromkeys([row.name, f"{module}.weight", *affected(exhibit)])),
            remedy="Shard each block on its own, so that every rank has its part of all of them, "
            "or cut the output while it is still a DTensor",
        )
    return None


def witness(exhibit: Exhibit) -> Row | None:
    """Return the last wrong value of forward that can be put together: it must be explained."""
    rows = [*exhibit.mismatches("module_outputs"), *exhibit.mismatches("loss")]
    known = [r for r in rows if exhibit.assembled(r) is not None]
    several = [r for r in known if exhibit.reference(r).numel() > 1]
    return next(reversed(several or known), None)


def _candidates(exhibit: Exhibit, row: Row) -> Iterator[tuple[str, str, int]]:
    """Give `(module, axis, blocks)` of weights that may be fused, sharded ones first.

    A weight that is whole may be what `gather_NAME` made of the ranks' parts.
    """
    found = []
    for parameter in exhibit.stage_rows("parameters"):
        module, _, last = parameter.name.rpartition(".")
        if last != "weight" or len(parameter.shape) != 2 or parameter.run != row.run:
            continue
        sharding = [axis for axis in exhibit.wide_axes if _is_split(exhibit, parameter, axis)]
        for axis in sharding or exhibit.wide_axes:
            size = exhibit.axes[axis]
            fitting = [n for n in _BLOCKS if parameter.shape[0] % (n * size) == 0]
            found += [(not sharding, module, axis, n) for n in fitting]
    for _, module, axis, blocks in sorted(found, key=lambda each: each[0]):
        yield module, axis, blocks


def _is_split(exhibit: Exhibit, row: Row, axis: str) -> bool:
    """Say whether the ranks of an axis hold other rows of a parameter."""
    held = exhibit.locals(row)
    line = next(iter(exhibit.lines(axis, held)), [])
    parts = [exhibit.region(row, at) for at in line[:2]]
    return len(parts) == 2 and None not in parts and parts[0] != parts[1]


def _order(blocks: int, ranks: int) -> list[int]:
    """Return which block of the contiguous weight is used where, in the order of use."""
    return [rank * blocks + block for block in range(blocks) for rank in range(ranks)]


def agrees(exhibit: Exhibit, tested: Row, value: Tensor | None) -> bool:
    """Say whether what ranks hold is this value."""
    found = exhibit.assembled(tested)
    if found is None or value is None:
        return False
    left = float((found - as_real(value).to(torch.float64)).norm())
    return left <= 4.0 * exhibit.tolerance(tested)
