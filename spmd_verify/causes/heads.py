"""`layout` of heads: rows of projections, cut or repeated in another order than one device's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected
from spmd_verify.causes.fused import agrees, witness
from spmd_verify.causes.interventions import Change, in_order, parameters_changed
from spmd_verify.causes.words import cause, listed
from spmd_verify.record import Cause, Row

# Each costs one step of one device.
_MOST_RUNS: Final = 96
# One number is that of some order by chance.
_FEWEST: Final = 4
# Heads that are told apart.
_BLOCKS: Final = (2, 4, 8, 3, 6)
# Projections that change places together: keys and values.
_TOGETHER: Final = 2


def heads(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout`: what one device computes with blocks of rows of its projections in another order.

    Rows of some, or rows of one and the columns of what reads them: heads that meet others'.
    """
    tested = witness(exhibit)
    if tested is None or exhibit.is_chance_open or exhibit.reference(tested).numel() < _FEWEST:
        return None
    for names, changes, order in itertools.islice(_candidates(exhibit, row), _MOST_RUNS):
        record = exhibit.runs.record(exhibit.batch, within=parameters_changed(changes))
        if record is None or not agrees(exhibit, tested, record[tested.stage].get(tested.name)):
            continue
        text = (
            f"{row.name} is computed with heads in another order: {tested.name} is what one device "
            f"gives with {len(order)} blocks of {listed(names)} as {', '.join(map(str, order))}: "
            f"heads over {', '.join(exhibit.wide_axes)} meet the keys and values of others"
        )
        tensors = [row.name, *names, *affected(exhibit)]
        return cause("layout", text, tensors=list(dict.fromkeys(tensors)), ranks=row.ranks)
    return None


def _candidates(
    exhibit: Exhibit, row: Row
) -> Iterator[tuple[list[str], dict[str, Change], tuple[int, ...]]]:
    """Give names of weights, what puts them into another order, and the order of blocks."""
    around = row.name.partition("[")[0].partition("#")[0].rpartition(".")[0]
    prefix = f"{around}." if around else ""
    sizes = {
        r.name: tuple(r.shape)
        for r in exhibit.stage_rows("parameters")
        if r.name.startswith(prefix) and r.name.endswith("weight") and len(r.shape) == 2
    }
    groups = list(_groups(sizes))
    for blocks in _BLOCKS:
        for order in _orders(blocks):
            for rows, columns in groups:
                size = sizes[rows[0]][0]
                if size % blocks or size == blocks:
                    continue
                changes: dict[str, Change] = {}
                for name in rows:
                    changes[name] = in_order(order)
                    changes[f"{name.rpartition('.')[0]}.bias"] = in_order(order)
                for name in columns:
                    changes[name] = in_order(order, 1)
                yield [*rows, *columns], changes, order


def _groups(sizes: dict[str, tuple[int, ...]]) -> Iterator[tuple[list[str], list[str]]]:
    """Give weights whose rows change places together, and those whose columns do with them."""
    for rows in itertools.combinations(sizes, _TOGETHER):
        if len({sizes[name] for name in rows}) == 1:
            yield list(rows), []
    for one, other in itertools.permutations(sizes, 2):
        if sizes[other][1] == sizes[one][0]:
            yield [one], [other]


def _orders(blocks: int) -> Iterator[tuple[int, ...]]:
    """Give orders: rows and columns of a grid exchanged, turns, the reverse."""
    straight = range(blocks)
    seen = {tuple(straight)}
    found = [
        tuple(i + j * inner for i in range(inner) for j in range(blocks // inner))
        for inner in range(2, blocks)
        if blocks % inner == 0
    ]
    found += [tuple((i + turn) % blocks for i in straight) for turn in range(1, blocks)]
    found.append(tuple(reversed(straight)))
    for order in found:
        if order not in seen:
            seen.add(order)
            yield order
