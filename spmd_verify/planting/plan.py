"""Which faults to plant: drawn over all kinds, the same for the same seed. Torch-free."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace as _replace

from spmd_verify.planting.faults import HALF, KINDS, Collective, Fault

# A wrong factor on what is reduced. How small a factor would be seen is measured apart, by the
# sensitivities; this one has to show through what it is added to: the squared norm of one bias,
# one of 13 terms of the example recurrent's clipping norm, moved that by 2e-7 when it was 1.0001.
RESCALED: Final = {"float32": 1.01, "float64": 1.01, "bfloat16": 1.25}
# What is gathered or sent may be added to something far larger: a normalisation's bias after one
# step, times 1.0001, moved the example transformer's activations by 1e-7 of their norm.
RESCALED_WHOLE: Final = 1.25

_DROPPABLE: Final = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"}
)


@dataclass(frozen=True)
class Ground:
    """What there is to plant faults in.

    Attributes:
        collectives: Of one step, each once.
        parameters: Trainable ones.
        buffers: Floating ones that the step writes.
        axes: Mesh axes in mesh order, `{name: ranks}`.
        dtype: The case's.
        can_halve: Whether a collective can run over half of the ranks.
    """

    collectives: Sequence[Collective]
    parameters: Sequence[str]
    buffers: Sequence[str]
    axes: Mapping[str, int]
    dtype: str
    can_halve: bool = True

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return math.prod(self.axes.values())


def draw(ground: Ground, number: int, seed: int) -> list[Fault]:
    """Return at most `number` faults: one of each kind in turn, until none is left."""
    source = random.Random(seed)
    waiting: list[list[Fault]] = []
    for kind in KINDS:
        faults = list(_faults(kind, ground, source))
        if kind != "reseed":
            source.shuffle(faults)
        waiting.append(faults)
    drawn: list[Fault] = []
    while len(drawn) < number and any(waiting):
        for faults in waiting:
            if faults and len(drawn) < number:
                drawn.append(faults.pop())
    return drawn


def _faults(kind: str, ground: Ground, source: random.Random) -> Iterator[Fault]:
    """Give every fault of one kind."""
    if kind == "stale":
        yield from (Fault(kind, tensor=name) for name in ground.parameters)
    elif kind == "skip_buffer":
        for name in ground.buffers:
            yield Fault(kind, tensor=name, rank=source.randrange(ground.num_ranks))
    elif kind == "reseed":
        # Rank 0 last, which is first to be drawn: a style that hands out its random numbers
        # minds no other rank's.
        others = range(1, ground.num_ranks)
        yield from (Fault(kind, rank=rank) for rank in [*source.sample(others, len(others))[:1], 0])
    else:
        for collective in ground.collectives:
            fault = _payload_fault(kind, collective, ground, source)
            if fault is not None and collective.size > 1:
                yield fault


def _payload_fault(
    kind: str, collective: Collective, ground: Ground, source: random.Random
) -> Fault | None:
    """Return the fault of a kind in one collective, None where the kind has no meaning there."""
    sums, size = collective.reduction == "sum", float(collective.size)
    # Integers carry sizes and pickles besides counts: only what is summed is a number.
    is_number = collective.is_floating or bool(collective.reduction)
    fault = Fault(
        kind,
        operator=collective.operator,
        axis=collective.axis,
        nth=collective.nth,
        line=collective.line,
    )
    if not is_number:
        return None
    if kind == "drop":
        return fault if collective.operator in _DROPPABLE else None
    if kind == "double":
        return _replace(fault, factor=size) if sums else None
    if kind == "rescale":
        reduced = RESCALED.get(ground.dtype, RESCALED["float32"])
        factor = reduced if collective.reduction else RESCALED_WHOLE
        return _replace(fault, factor=factor) if collective.is_floating else None
    if kind == "wrong_operation":
        factors = {"sum": 1.0 / size, "avg": size}
        factor = factors.get(collective.reduction, 1.0)
        return _replace(fault, factor=factor) if factor != 1.0 and collective.is_floating else None
    if kind == "wrong_group":
        group = _other_group(collective, ground)
        return _replace(fault, group=group) if group else None
    if kind == "shift":
        return fault if collective.is_floating and collective.rows != 1 else None
    ranks = collective.ranks or range(ground.num_ranks)
    return _replace(fault, rank=source.choice(list(ranks)))


def _other_group(collective: Collective, ground: Ground) -> str:
    """Return a group to run a collective in instead: another axis, half of the ranks, or none.

    Only a reduction that keeps its shape runs in a group of another size.
    """
    keeps_shape = collective.operator == "all_reduce"
    own = collective.axis.split(",")
    for name, size in ground.axes.items():
        is_other = collective.axis != name and (len(own) > 1 or own[0] in ground.axes)
        if is_other and size > 1 and (keeps_shape or size == collective.size):
            return name
    has_halves = collective.size == ground.num_ranks >= 4 and ground.num_ranks % 2 == 0
    return HALF if ground.can_halve and has_halves and keeps_shape else ""
