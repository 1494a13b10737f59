"""Small named models, one per construct, and the way to check each under every mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from lockstep_check import MODES, Outcome, Step, check
from torch import Tensor, nn

Batch = Callable[[int], tuple[Any, ...]]
# Uneven over 4 ranks, and fewer samples than ranks.
DEFAULT_SIZES = (7, 2)


class Body(nn.Module):
    """A module of a function and its members.

    Args:
        function: Called as `function(self, *inputs)`.
        members: Modules, parameters and (plain tensors) buffers.
    """

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, nn.Module | nn.Parameter) or not isinstance(member, Tensor):
                setattr(self, name, member)
            else:
                self.register_buffer(name, member)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return `function(self, ...)`."""
        return self.function(self, *inputs, **named)


def score(outputs: Any) -> Tensor:
    """Return a smooth mean of the outputs that is not symmetric in their sign."""
    total: Any = 0.0
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + (real.sin() + real * real).mean()
    return total


def train(model: nn.Module, optimizer: Any, *batch: Any, **named: Any) -> dict[str, Any]:
    """One plain training step; returns the loss and what the model returned."""
    optimizer.zero_grad()
    outputs = model(*batch, **named)
    loss = score(outputs)
    loss.backward()
    optimizer.step()
    return {"loss": loss, "outputs": outputs}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum over the parameters that are trained."""
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Construct:
    """One row of a table.

    Attributes:
        name: Test id.
        model: Makes the model.
        batch: Global batch size -> the step's arguments.
        step: The training step.
        optimizer: Parameters -> optimizer.
        sizes: Batch sizes to check on 4 ranks.
        falls_back: Operators that are gathered and replicated, on purpose.
        gathers: Whether activations are gathered even where every operator has a rule.
        tol: Allowed relative difference.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    step: Step = train
    optimizer: Callable[..., Any] = sgd
    sizes: Sequence[int] = DEFAULT_SIZES
    falls_back: frozenset[str] = frozenset()
    gathers: bool = False
    tol: float = 1e-11


def parametrise(table: list[Construct]) -> Any:
    """Return the pytest mark that runs a test for every construct and batch size.

    Of the constructs with the default sizes every second one leaves out the batch smaller
    than the ranks: time, not coverage, since each family keeps several.
    """
    rows = [
        pytest.param(construct, size, id=f"{construct.name}-{size}")
        for position, construct in enumerate(table)
        for size in construct.sizes
        if not (size == 2 and construct.sizes == DEFAULT_SIZES and position % 2)
    ]
    return pytest.mark.parametrize(("construct", "size"), rows)


def run(construct: Construct, size: int, modes: Sequence[Any] = MODES) -> list[Outcome]:
    """Check a construct on 4 ranks, its fallbacks and its gathers.

    Raises:
        AssertionError: An output differs, an operator fell back that should not, or
            activations were gathered under `replicate`.
    """
    torch.manual_seed(size)
    batch = construct.batch(size)
    outcomes = check(
        construct.model, construct.optimizer, construct.step, batch, tol=construct.tol, modes=modes
    )
    for outcome in outcomes:
        extra = set(outcome.fallbacks) - construct.falls_back
        assert not extra, f"{outcome.mode}: fell back for {sorted(extra)}"
        # Of a very small batch the cost rule may gather what is cheaper than a reduction.
        divided = size >= 7 and not construct.gathers and not construct.falls_back
        if outcome.mode == "replicate" and divided:
            assert not outcome.gathers, f"activations gathered: {dict(outcome.gathers)}"
    return outcomes


def tensor(*shape: int, scale: float = 1.0) -> Batch:
    """Return a batch maker: one normal tensor [n, *shape]."""
    return lambda n: (torch.randn(n, *shape) * scale,)


def parameter(*shape: int) -> nn.Parameter:
    """Return a normal parameter, scaled by its last size."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1] if shape else 1))
