"""Elements whose update only rounding decides, and how noise in gradients reaches updates.

A gradient that is mathematically zero (attention key bias, a bias in front of BatchNorm) is
noise on both sides, and Adam turns it into +-lr. Normative: verdicts.md part 6. All tensors
are global; one instance follows one free run, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_verify.noise.floors import (
    AMPLIFIED,
    FEW_ELEMENTS,
    NEGLIGIBLE_SHARE,
    Ensemble,
    Floor,
    Key,
    rms,
)
from spmd_verify.norms import row_sums, rows_of

# The gradient interval is [g - delta, g + delta], delta this multiple of the largest error
# that the runs show in that element: the limit c of float32 (verdict.LIMITS).
INTERVAL: Final = 4.0
# State of such elements may hold squares of gradients, so its interval is the square.
STATE_INTERVAL: Final = INTERVAL * INTERVAL


@dataclass
class UpdateNoise:
    """Follows elements through the steps of a free run, or through one anchored step.

    Attributes:
        initial: Parameters before the first step that is taken in.
        flips: Per step, the elements whose update that step only rounding decides, bool, by
            parameter; parameters without any are absent.
        set_apart: By parameter, elements that were decided so in any step until now. Their rows
            are judged by their own floor, so that they do not hide what happens in the rest.
        undetermined: Those of them that moved enough to say nothing of the candidate.
    """

    ensemble: Ensemble
    initial: Mapping[str, Tensor]
    flips: list[dict[str, Tensor]] = field(default_factory=list)
    set_apart: dict[str, Tensor] = field(default_factory=dict)
    undetermined: dict[str, Tensor] = field(default_factory=dict)
    _largest_noise: dict[str, Tensor] = field(default_factory=dict)
    _largest_gradient: dict[str, Tensor] = field(default_factory=dict)
    _predicted: dict[str, Tensor] = field(default_factory=dict)
    _spans: dict[str, Tensor] = field(default_factory=dict)
    _roundoff: float = 0.0

    def advance(self, step: int, scales: Mapping[str, Tensor], roundoff: float) -> None:
        """Take in one step.

        Args:
            step: The next step, from 0.
            scales: S of the gradients, by parameter.
            roundoff: u of the case's dtype.
        """
        self._roundoff = roundoff
        record = self.ensemble.exact[step]
        before = self.ensemble.exact[step - 1]["parameters"] if self.flips else self.initial
        updates = {
            name: (value - before[name]).to(torch.float64)
            for name, value in record["parameters"].items()
            if name in record["gradients"] and name in before and not value.is_complex()
        }
        typical = rms(updates.values())
        self.flips.append({})
        for name, update in updates.items():
            gradient = record["gradients"][name].to(torch.float64)
            key = (step, "gradients", name)
            if key not in self.ensemble.elements or not gradient.numel():
                continue
            noise = typical_noise(self.ensemble, key)
            scale = scales.get(name)
            if scale is not None:
                noise = torch.maximum(noise, 2.0 * roundoff * scale)
            self._advance_one(step, name, update, gradient, noise, typical)

    def _advance_one(
        self, step: int, name: str, update: Tensor, gradient: Tensor, noise: Tensor, typical: float
    ) -> None:
        """Take in one parameter at one step."""
        known = self._largest_noise.get(name)
        largest = self._largest_noise[name] = (
            noise if known is None else torch.maximum(known, noise)
        )
        known = self._largest_gradient.get(name)
        size = gradient.abs()
        peak = self._largest_gradient[name] = size if known is None else torch.maximum(known, size)
        share = torch.where(peak > 0, largest / peak.clamp(min=1e-300), 0.0).clamp(max=1.0)
        predicted = self._predicted.get(name, torch.zeros_like(update)) + update.abs() * share
        spans = (size <= INTERVAL * noise) & (noise > 0)
        if bool(spans.any()):
            self._spans[name] = _union(self._spans.get(name), spans)
            spread = self.ensemble.elements.get((step, "parameters", name))
            moved = update.abs() if spread is None else torch.maximum(update.abs(), spread)
            # The largest of all such elements: one draw of each says little.
            reach = float(moved[spans].max())
            if reach > AMPLIFIED * self._roundoff * typical:
                self.flips[-1][name] = spans
                self.set_apart[name] = _union(self.set_apart.get(name), spans)
                # An interval far inside the step that the rest takes decides: both sides
                # agree that the element does not move.
                if reach > NEGLIGIBLE_SHARE * typical:
                    self.undetermined[name] = _union(self.undetermined.get(name), spans)
                reach *= 2.0  # from one end of the interval to the other
            predicted = torch.where(spans, predicted + reach, predicted)
        self._predicted[name] = predicted

    def widen_parameter(self, step: int, name: str, floor: Floor) -> None:
        """Raise a parameter's floor to what its gradients' noise makes of it, in place."""
        predicted = self._predicted.get(name)
        if predicted is None:
            return
        self._widen(step, name, floor, predicted)

    def widen_state(self, step: int, name: str, floor: Floor) -> None:
        """Raise the floor of a state tensor shaped like its parameter, in place."""
        parameter = name.rsplit(".", 1)[0]
        value = self.ensemble.exact[step]["optimizer_state"][name]
        largest = self._largest_noise.get(parameter)
        if largest is None or value.shape != largest.shape or value.is_complex():
            return
        peak = self._largest_gradient[parameter].clamp(min=1e-300)
        # 2: state may be the square of a gradient, whose relative noise is twice as large.
        predicted = value.to(torch.float64).abs() * (2.0 * largest / peak).clamp(max=1.0)
        spans = self._spans.get(parameter)
        spread = self.ensemble.elements.get((step, "optimizer_state", name))
        if spans is not None and spread is not None:
            predicted = torch.where(spans, STATE_INTERVAL * spread, predicted)
        self._widen(step, parameter, floor, predicted, is_state=True)

    def _widen(
        self, step: int, name: str, floor: Floor, predicted: Tensor, is_state: bool = False
    ) -> None:
        """Raise a floor to predicted elementwise noise; mark rows of undetermined elements."""
        squares = row_sums(predicted.square())
        floor.noise_rows = torch.maximum(floor.noise_rows, squares.sqrt())
        spans = self.set_apart.get(name)
        if spans is None:
            floor.noise = max(floor.noise, float(squares.sum().sqrt()))
            return
        marked = row_sums(spans.to(torch.float64)) > 0
        if is_state:
            floor.noise = max(floor.noise, float(squares.sum().sqrt()))
            return
        floor.undetermined_rows = marked
        undetermined = self.undetermined.get(name)
        floor.undetermined_elements = 0 if undetermined is None else int(undetermined.sum())
        # The tensor's floor is over the other rows: one element that moves by the learning
        # rate must not hide what happens in the rest.
        own = self.ensemble.rows.get((step, "parameters", name))
        clean = ~marked
        floor.noise = max(
            float(own[clean].sum().sqrt()) if own is not None else 0.0,
            float(squares[clean].sum().sqrt()),
            2.0 * self._roundoff * float(floor.scale_rows[clean].square().sum().sqrt()),
        )


def typical_noise(ensemble: Ensemble, key: Key) -> Tensor:
    """Return the noise of each element: its largest error, or its row's typical one if larger.

    The largest of half a dozen draws of one number is no bound for the next; the elements of a
    row (of the whole tensor, where rows have few elements) come from one computation. Elements
    that no run ever moved stay at 0.
    """
    own = ensemble.elements[key]
    per_row = rows_of(own).shape[1]
    shared = (ensemble.rows[key] / per_row).sqrt()
    if per_row <= FEW_ELEMENTS:
        shared = shared.clamp(min=math.sqrt(ensemble.total[key] / own.numel()))
    pooled = torch.maximum(rows_of(own), shared[:, None]).reshape(own.shape)
    return torch.where(own > 0, pooled, own)


def _union(known: Tensor | None, more: Tensor) -> Tensor:
    """Return the elements that are in either mask."""
    return more if known is None else known | more
