"""Which of an operator's candidates may run at all, and where a node belongs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from spmd.layout import Partial, Placement, Replicate, Shard
from spmd.rules import Call, Candidate, Rule


def all_replicated(num_inputs: int, num_outputs: int) -> Candidate:
    """Return the candidate that is always possible: everything whole on every rank."""
    whole = Replicate()
    return Candidate((whole,) * num_inputs, (whole,) * num_outputs)


def candidates_of(
    rule: Rule, call: Call, forms: Sequence[Sequence[Placement]], num_ranks: int
) -> Iterable[Candidate]:
    """Yield a rule's candidates on an axis; values in repeated parts as on an axis of one block.

    Args:
        rule: The operator's.
        call: The call.
        forms: For each operand, the placements it has.
        num_ranks: Ranks on the axis.
    """
    blocks = {_block(p, num_ranks) for own in forms for p in own} - {num_ranks}
    if not blocks:
        yield from rule.candidates(call, forms, num_ranks)
        return
    for block in (num_ranks, *sorted(blocks)):
        # A block is an axis to itself: what a rule says of one axis holds in each of them.
        inside = [[_inside(p) for p in own if _fits(p, block, num_ranks)] for own in forms]
        for candidate in rule.candidates(call, inside, block):
            yield candidate if block == num_ranks else _repeated(candidate, block)


def _block(placement: Placement, num_ranks: int) -> int:
    if isinstance(placement, Shard):
        return len(placement.units)
    return placement.block or num_ranks if isinstance(placement, Partial) else num_ranks


def _fits(placement: Placement, block: int, num_ranks: int) -> bool:
    return isinstance(placement, Replicate) or _block(placement, num_ranks) == block


def _inside(placement: Placement) -> Placement:
    return Partial(placement.op) if isinstance(placement, Partial) else placement


def _repeated(candidate: Candidate, block: int) -> Candidate:
    def again(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(Partial(p.op, block) if isinstance(p, Partial) else p for p in placements)

    return Candidate(again(candidate.inputs), again(candidate.outputs))


def compatible(candidate: Candidate, inputs: Any, outputs: Any, axis: int) -> bool:
    """Whether no tensor would be sharded on one dim by two axes."""
    pairs = list(zip(candidate.inputs, inputs, strict=True))
    pairs += list(zip(candidate.outputs, outputs, strict=True))
    for placement, layout in pairs:
        if isinstance(placement, Shard):
            for other in layout.placements[:axis]:
                if isinstance(other, Shard) and other.dim == placement.dim:
                    return False
        if isinstance(placement, Partial):
            for other in layout.placements[:axis]:
                if isinstance(other, Partial) and other.op != placement.op:
                    return False
    return True


def rounds_partial_sums(candidate: Candidate, call: Call) -> bool:
    """Whether an optimizer's operator would round its sum over the ranks to half precision.

    Muon orthogonalises in bfloat16, where each rank's part of a sum would be rounded: three
    digits lost, which gathering the matrix first does not lose.
    """
    if region_of(call.node) != "optimizer":
        return False
    return any(
        isinstance(placement, Partial)
        and fake is not None
        and fake.dtype.itemsize <= 2
        and fake.dtype.is_floating_point
        for fake, placement in zip(call.outputs, candidate.outputs, strict=True)
    )


def region_of(node: fx.Node) -> str:
    """Return where the step was when the node was traced: forward, backward or optimizer."""
    return node.meta.get("custom", {}).get("region", "forward")
