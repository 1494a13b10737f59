"""Which of an operator's candidates may run at all, and where a node belongs."""

from __future__ import annotations

from typing import Any

from torch import fx

from spmd.layout import Partial, Replicate, Shard
from spmd.rules import Call, Candidate


def all_replicated(num_inputs: int, num_outputs: int) -> Candidate:
    """Return the candidate that is always possible: everything whole on every rank."""
    whole = Replicate()
    return Candidate((whole,) * num_inputs, (whole,) * num_outputs)


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
