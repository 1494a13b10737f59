"""The smallest condition under which the cells of a sweep fail. Torch-free.

A sweep runs one case over many meshes and styles. What its failing cells have in common, and no
other cell has, is often one word about the mesh and one about the style: "fails iff tp >= 2 and
sequence parallel". The condition is about the cells that were judged; it proves nothing of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spmd_verify.exit_codes import fails
from spmd_verify.record import Cell
from spmd_verify.style_ids import TRAITS, traits

# Longer ones explain a handful of cells by listing them.
_MOST_WORDS: Final = 3


@dataclass(frozen=True)
class _Word:
    """One thing that some of the cells have.

    Attributes:
        text: As it is said.
        cells: Positions of the cells that have it.
        cost: Of two conditions of one length the cheaper one is said.
    """

    text: str
    cells: frozenset[int]
    cost: int


def condition(cells: Sequence[Cell], *, strict: bool = False) -> str | None:
    """Return under which condition the cells of one case fail, in one line.

    Args:
        cells: All cells of one case.
        strict: Whether `--strict` decides what fails.

    Returns:
        None where none or one cell was judged, or none fails.
    """
    judged = [cell for cell in cells if cell.verdict not in ("unsupported", "error")]
    failing = frozenset(i for i, cell in enumerate(judged) if fails(cell, strict=strict))
    if len(judged) < 2 or not failing:
        return None
    among = f"of {len(judged)} cells judged"
    if len(failing) == len(judged):
        return f"fails in all {among}"
    words = list(dict.fromkeys(_words(judged)))
    found = _smallest(words, failing, len(judged))
    if found is None:
        return f"fails in {len(failing)} {among}; nothing short tells them from the others"
    return f"fails iff {found} ({len(failing)} {among})"


def _smallest(words: list[_Word], failing: frozenset[int], count: int) -> str | None:
    """Return the shortest conjunction of words that just the failing cells have, or two by `or`."""
    everything = frozenset(range(count))
    fitting = [word for word in words if failing <= word.cells and word.cells != everything]
    for length in range(1, _MOST_WORDS + 1):
        found = [
            (sum(word.cost for word in chosen), " and ".join(word.text for word in chosen))
            for chosen in itertools.combinations(fitting, length)
            if frozenset.intersection(*(word.cells for word in chosen)) == failing
        ]
        if found:
            return min(found, key=lambda each: each[0])[1]
    inside = [word for word in words if word.cells <= failing]
    either = [
        (first.cost + second.cost, f"{first.text} or {second.text}")
        for first, second in itertools.combinations(inside, 2)
        if first.cells | second.cells == failing
    ]
    return min(either, key=lambda each: each[0], default=(0, None))[1]


def _words(cells: Sequence[Cell]) -> Iterator[_Word]:
    """Give everything that can be said of a cell by its mesh and its style."""
    meshes = [_sizes(cell.mesh) for cell in cells]
    for axis in dict.fromkeys(axis for mesh in meshes for axis in mesh):
        yield from _of_sizes(axis, [mesh.get(axis, 1) for mesh in meshes], 1)
    yield from _of_sizes("ranks", [cell.world_size for cell in cells], 2)
    for trait in TRAITS.values():
        yield _Word(trait, _positions(trait in traits(cell.style) for cell in cells), 1)
    for style in dict.fromkeys(cell.style for cell in cells):
        yield _Word(f"style {style}", _positions(cell.style == style for cell in cells), 2)


def _of_sizes(name: str, sizes: list[int], cost: int) -> Iterator[_Word]:
    """Give what can be said of a number that every cell has."""
    for size in sorted(set(sizes))[1:]:
        yield _Word(f"{name} >= {size}", _positions(each >= size for each in sizes), cost)
    for size in sorted(set(sizes))[:-1]:
        yield _Word(f"{name} <= {size}", _positions(each <= size for each in sizes), cost + 1)
    yield _Word(f"{name} odd", _positions(each % 2 == 1 for each in sizes), cost + 2)
    for size in sorted(set(sizes)):
        yield _Word(f"{name} = {size}", _positions(each == size for each in sizes), cost + 2)


def _positions(flags: Iterator[bool]) -> frozenset[int]:
    """Return where the flags are true."""
    return frozenset(i for i, flag in enumerate(flags) if flag)


def _sizes(mesh: str) -> dict[str, int]:
    """Read a mesh as records hold it."""
    pairs = (part.partition("=") for part in mesh.split(","))
    return {name: int(size) for name, _, size in pairs}
