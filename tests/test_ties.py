"""A decision that rounding takes is a tie: found, replayed as the reference took it, judged again.

Normative: verdicts.md part 6; docs/design.md 3.10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_verify import run
from spmd_verify.case import LoadedCase, load_case
from spmd_verify.deciding import call_of
from spmd_verify.forcing import Forcing, NearTie
from spmd_verify.near_ties import Noise, Recording, near_ties
from spmd_verify.options import MeshSpec, Options
from spmd_verify.record import Cell, Record, Tie
from spmd_verify.reporters import terminal
from spmd_verify.runner.specs import TIES_JOB
from spmd_verify.tie_replay import judged_again

aten = torch.ops.aten
CaseWriter = Callable[..., str]


class Silent:
    """Receives the events of a run."""

    def note(self, text: str) -> None: ...
    def started(self, what: str) -> None: ...
    def finished(self, cell: Cell) -> None: ...
    def alive(self, style: str, step: int, rank: int) -> None: ...


# -- deciding operators ----------------------------------------------------------------------


def margins_of(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the margins of one call."""
    call = call_of(func, args, kwargs)
    assert call is not None
    return call.decider.margins(call, call.rows())


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        (lambda x: margins_of(aten.topk.default, x, 2), [1.0, 0.25]),
        (lambda x: margins_of(aten.topk.default, x, 2, -1, False), [0.5, 0.5]),
        (lambda x: margins_of(aten.topk.default, x, 4), [0.5, 0.25]),
        (lambda x: margins_of(aten.argmax.default, x, 1), [2.0, 1.0]),
        (lambda x: margins_of(aten.argmin.default, x, 1), [4.5, 0.5]),
        (lambda x: margins_of(aten.argmax.default, x), [0.0]),
        (lambda x: margins_of(aten.max.dim, x, 1), [2.0, 1.0]),
        (lambda x: margins_of(aten.max.dim, x.t(), 0), [2.0, 1.0]),
        (lambda x: margins_of(aten.sort.default, x), [0.5, 0.25]),
        (lambda x: margins_of(aten.kthvalue.default, x, 2), [0.5, 0.5]),
        (lambda x: margins_of(aten.median.dim, x, 1), [0.5, 0.25]),
    ],
)
def test_a_margin_is_the_smallest_gap_that_matters(margins: Any, expected: list[float]) -> None:
    x = torch.tensor([[4.0, 2.0, 1.0, -4.0, 0.5], [4.0, 3.0, 2.75, 2.0, 1.5]])

    assert margins(x).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "ceil"), [(2, 0, 1, False), (2, 1, 1, True), (1, 1, 2, False)]
)
def test_a_pooling_margin_is_that_of_its_closest_window(
    stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    arguments = ([3, 2], [stride], [padding], [dilation], ceil)
    pooled, _ = aten.max_pool2d_with_indices.default(x, *arguments)
    padded = F.pad(x, [padding, padding + stride, padding, padding + stride], value=-math.inf)
    rows, columns = pooled.shape[2:]
    for sample, channel in itertools.product(range(2), range(3)):
        smallest = math.inf
        for i, j in itertools.product(range(rows), range(columns)):
            window = padded[
                sample,
                channel,
                i * stride : i * stride + 2 * dilation + 1 : dilation,
                j * stride : j * stride + dilation + 1 : dilation,
            ]
            two = window.reshape(-1).sort(descending=True).values[:2]
            smallest = min(smallest, float(two[0] - two[1]) if two[1] > -math.inf else math.inf)
        found = margins_of(aten.max_pool2d_with_indices.default, x, *arguments)
        assert float(found[sample * 3 + channel]) == pytest.approx(smallest)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of the sum of a function's weighted results."""
    leaf = x.clone().requires_grad_()
    out = function(leaf * 1.0)
    (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def ties_of(function: Callable[[Tensor], Any], x: Tensor, noise: float) -> list[NearTie]:
    """Return the near ties of what a function does to `x`, all rows having the same noise."""
    recording = Recording()
    with recording.at(0):
        function(x)
    found: list[NearTie] = []
    for decision in recording.decisions.values():
        measured = Noise.around([row.double() for row in decision.rows])
        measured.error += noise
        found += measured.near_ties("free", 0, decision)
    return found


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        lambda x: F.relu(x, inplace=True),
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: F.leaky_relu(x, 0.1, inplace=True),
        lambda x: F.hardtanh(x, 0.0, 6.0),
        lambda x: F.relu6(x, inplace=True),
        lambda x: F.threshold(x, 0.0, 0.0),
        lambda x: F.prelu(x, torch.tensor([0.2])),
        lambda x: x.clamp(min=0.0),
        torch.abs,
        lambda x: torch.where(x > 0, x, 3 * x),
        lambda x: x * (x + 1.0).floor(),
        lambda x: x * (x + 0.5).round(),
        lambda x: x.amax(1),
        lambda x: x.max(1).values,
        lambda x: x.sort(1).values,
        lambda x: x.topk(2, 1).values,
        lambda x: x.median(1).values,
        lambda x: F.max_pool1d(x[None], 2)[0],
        lambda x: F.max_pool2d(x[None, None], 2)[0],
        lambda x: torch.maximum(x, x.new_zeros(())),
    ],
)
def test_a_forced_decision_has_the_gradient_of_the_reference(function: Any) -> None:
    """Values on the other side of a decision, by rounding, get the reference's gradient."""
    x = torch.tensor([[1e-7, -1e-7, 2.0, 2.0 + 3e-7], [-1e-7, 1e-7, 5.0 - 6e-7, 5.0]])
    reference = torch.tensor([[-1e-7, 1e-7, 2.0 + 3e-7, 2.0], [1e-7, -1e-7, 5.0, 5.0 - 6e-7]])
    right = gradient(function, reference)
    assert not torch.allclose(gradient(function, x), right, atol=1e-4), "nothing to force"
    forcing = Forcing(ties_of(lambda x: gradient(function, x), reference, noise=5e-7))

    with forcing.at("free", 0):
        forced = gradient(function, x)

    assert torch.allclose(forced, right, atol=1e-4)
    assert forcing.flipped


def test_integers_and_masks_decide_nothing() -> None:
    whole = torch.arange(4)

    assert call_of(aten.topk.default, (whole, 2), {}) is None
    assert call_of(aten.gt.Scalar, (whole, 2), {}) is None
    assert call_of(aten.mul.Tensor, (whole, 2), {}) is None
