"""What `--adversarial` does to a case: its batches and its model, from one decided description.

Everything here follows from `Changes` alone, so that the reference and every rank do the same.
All tensors are global. Normative: verdicts.md part 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.parts import map_leaves

OVERRIDE: Final = "adversarial"
# Odd multiples of 1/512 below 1/16: never zero, 5 bits, so exact in every dtype around zero.
# Large enough to be seen next to any noise, small enough to leave the model what it is.
_STEPS_OF_PATTERN: Final = 32
_GRID: Final = 512
# Scales of samples are k/64 in (1/2, 1]: a target of 0..1 stays one. A prime number of them,
# so that no two ranks have the same ones.
_SCALES: Final = 31
# The step in which the second half of the batch, and so the last rank's part, has no label.
_EMPTY_STEP: Final = 1


@dataclass(frozen=True)
class Changes:
    """What is changed in a case; the empty one changes nothing.

    Attributes:
        size: Samples kept of every batch; 0 keeps all.
        is_permuted: Whether later steps see the samples in other orders.
        is_repeated: Whether samples of one batch are equal to each other as they are.
        scaled: Floating inputs that are scaled per sample, by argument path.
        rolled: Integer inputs that are rolled per sample.
        labels: Integer leaves, each with the value that makes a loss ignore a label.
        has_empty_part: Whether the second half of the batch has no label in one step.
        parameters: Parameters that are moved from their constant.
        can_evaluate: Whether an eval forward may run between steps.
        notes: What was changed and what was not, one line each.
    """

    size: int = 0
    is_permuted: bool = False
    is_repeated: bool = False
    scaled: tuple[str, ...] = ()
    rolled: tuple[str, ...] = ()
    labels: tuple[tuple[str, int], ...] = ()
    has_empty_part: bool = False
    parameters: tuple[str, ...] = ()
    can_evaluate: bool = False
    notes: tuple[str, ...] = ()

    def overrides(self) -> dict[str, str]:
        """Return the overrides that stand for these changes."""
        between = {"between": "eval"} if self.can_evaluate else {}
        return {"inputs": f"{OVERRIDE}:{json.dumps(asdict(self))}", **between}


def decided(override: str) -> Changes | None:
    """Return the changes an override stands for; None where they are still to be found."""
    _, colon, text = override.partition(":")
    if not colon:
        return None
    found = json.loads(text)
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    labels = tuple((path, value) for path, value in found["labels"])
    return Changes(**{**found, **lists, "labels": labels})


def changed_batch(case: LoadedCase, batch: Any, step: int, changes: Changes) -> Any:
    """Return a step's batch with the changes; leaves without a batch dim stay as they are."""
    ignored = dict(changes.labels)

    def change(path: str, leaf: Any) -> Any:
        dim = case.input_batch_dims.get(path)
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        value = leaf.detach().movedim(dim, 0)
        value = value[: changes.size or len(value)]
        if changes.is_permuted and step > 0:
            value = value[order(len(value), step)]
        if path in changes.rolled:
            value = _rolled(value)
        if path in changes.scaled and (step > 0 or changes.is_repeated):
            value = _by_sample(value, lambda sample: _scale(sample, step))
        if path in ignored:
            mask = ignored_labels(value.shape, step, has_empty_part=changes.has_empty_part)
            value = value.masked_fill(mask, ignored[path])
        return value.movedim(0, dim).contiguous().requires_grad_(leaf.requires_grad)

    return map_leaves(case, batch, change)


def order(size: int, step: int) -> Tensor:
    """Return the order of a step's samples, [size]; never the one they have."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randperm(size, generator=generator)
    return drawn.roll(1) if torch.equal(drawn, torch.arange(size)) else drawn


def _scale(sample: int, step: int) -> float:
    """Return the factor of a sample in a step, in (1/2, 1]."""
    return 1.0 - ((5 * sample + 3 * step) % _SCALES) / 64


def _by_sample(value: Tensor, factor: Callable[[int], float]) -> Tensor:
    """Return [samples, ...] with each sample times its factor."""
    factors = torch.tensor([factor(i) for i in range(len(value))], dtype=value.dtype)
    return value * factors.reshape(-1, *[1] * (value.ndim - 1))


def _rolled(value: Tensor) -> Tensor:
    """Return [samples, ...] with the values of sample i moved on by i places."""
    rows = value.reshape(len(value), -1)
    return torch.stack([row.roll(i) for i, row in enumerate(rows)]).reshape(value.shape)


def ignored_labels(shape: tuple[int, ...], step: int, *, has_empty_part: bool) -> Tensor:
    """Return which labels are ignored in a step, bool of [samples, ...].

    A quarter of the first sample's labels to three quarters of the last one's, spread evenly;
    with `has_empty_part` all of the second half of the batch in step 1, where the last rank
    of any axis has its part.
    """
    size, each = shape[0], int(torch.Size(shape[1:]).numel())
    if size < 2:
        return torch.zeros(shape, dtype=torch.bool)
    whole = 4 * (size - 1)  # shares are multiples of 1 / whole, from 1/4 to 3/4
    shares = (size - 1 + 2 * torch.arange(size)).repeat_interleave(each)
    summed = shares.cumsum(0)
    mask = (summed // whole > (summed - shares) // whole).reshape(shape)
    if has_empty_part and step == _EMPTY_STEP:
        mask[size - size // 2 :] = True
    return mask


def is_constant(parameter: Tensor) -> bool:
    """Say whether a trainable floating parameter has one value everywhere."""
    if not (parameter.requires_grad and parameter.is_floating_point() and parameter.numel()):
        return False
    return bool((parameter == parameter.flatten()[0]).all())


def change_model(model: nn.Module, changes: Changes) -> None:
    """Move the chosen parameters from their constant, in place.

    Zeros become +-k/512 below 1/16, another constant moves by as much of itself; which k an
    element has depends on the parameter's place in the model and the element's in it.
    """
    chosen = frozenset(changes.parameters)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if name not in chosen:
            continue
        generator = torch.Generator().manual_seed(place)
        drawn = torch.randint(_STEPS_OF_PATTERN, parameter.shape, generator=generator)
        pattern = (2 * drawn - (_STEPS_OF_PATTERN - 1)).to(torch.float64) / _GRID
        constant = parameter.detach().to(torch.float64)
        moved = torch.where(constant == 0, pattern, constant * (1 + pattern))
        parameter.data.copy_(moved)
