"""Free and anchored runs in one model: only where nothing hidden carries over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from judging_cases import make_case
from torch import Tensor, nn

from spmd_verify.reference.single import make_reference
from spmd_verify.reference.trajectory import first_difference


class Counting(nn.Module):
    """Scales its output by a counter that no state shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 4] to [batch, 3]."""
        self.calls += self.training
        return self.layer(x) * (1.0 + self.calls)


def _case(model: type[nn.Module], **more: Any) -> Any:
    """Return a case over batches of 8."""
    inputs = [torch.randn(8, 4, generator=torch.Generator().manual_seed(1))]
    return make_case("own", dtype="float32", model=model, inputs=lambda: inputs, **more)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_plain_model_may_go_on_from_any_state(steps: int) -> None:
    """Anchored steps after free ones are those of an anchored run alone, bit for bit."""
    device, reference = make_reference(make_case("mlp", dtype="float32", steps=steps))
    assert device.can_branch
    free, anchored = device.run_both(reference.run)
    assert first_difference(reference.run.steps, free.steps) is None
    alone = device.run(anchors=reference.run)
    assert first_difference(alone.steps, anchored.steps) is None
    assert "eval_outputs" not in anchored.steps[0]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_counter_in_the_model_is_noticed(steps: int) -> None:
    """What a step keeps outside of all state forbids to go on from another step."""
    device, reference = make_reference(_case(Counting, steps=steps))
    assert not device.can_branch
    _, anchored = device.run_both(reference.run)
    assert first_difference(reference.run.steps[1:], [
        {**seen, "eval_outputs": known.get("eval_outputs", {})}
        for seen, known in zip(anchored.steps[1:], reference.run.steps[1:], strict=True)
    ]) is None  # fmt: skip
