"""The floors of all tensors of one run, from its ensemble of noise runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_verify.floors import Ensemble, Floor, Key, base_floor, judge_usable, median_relative, rms
from spmd_verify.ill_conditioned import UpdateNoise
from spmd_verify.norms import as_real, is_rounding
from spmd_verify.verdict import STAGES

# S by step, stage and name, for what parts of a batch add up to.
Scales = list[dict[str, dict[str, Tensor]]]

# Copied, not computed: compared bit by bit, so they have no floor.
COPIED_STAGES: Final = frozenset({"inputs", "initial_state"})


@dataclass
class FloorTable:
    """Builds the floors of one run.

    Attributes:
        ensemble: The noise runs.
        scales: S per step where parts of the batch exist; may be empty.
        place: What a floor that decides nothing is blamed on; may be empty.
        roundoff: u of the case's dtype.
        is_free: Whether steps follow each other, so that noise is carried on.
        undetermined: Parameter elements whose update only rounding decides, after `build`.
    """

    ensemble: Ensemble
    scales: Scales
    place: str
    roundoff: float
    is_free: bool
    undetermined: Mapping[str, Tensor] = field(default_factory=dict)
    _relative: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)

    def build(self) -> dict[Key, Floor]:
        """Return the floor of every tensor that rounds."""
        updates = start_updates(self.ensemble)
        self._relative = self._relative_noise()
        found: dict[Key, Floor] = {}
        for step in range(len(self.ensemble.exact)):
            parts = self.scales[step] if self.scales else {}
            if step and not self.is_free:
                updates = UpdateNoise(self.ensemble, self.ensemble.expected[step - 1]["parameters"])
            updates.advance(step, parts.get("gradients", {}), self.roundoff)
            for stage in STAGES:
                if stage not in COPIED_STAGES:
                    found.update(self._stage(step, stage, parts.get(stage, {}), updates))
        self.undetermined = updates.undetermined
        return found

    def _relative_noise(self) -> dict[tuple[str, str], dict[int, float]]:
        """Return error / ||S|| of every tensor by step."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for (step, stage, name), total in self.ensemble.total.items():
            parts = self.scales[step].get(stage, {}) if self.scales else {}
            value = self.ensemble.exact[step][stage][name]
            norm = float(as_real(parts.get(name, value)).to(torch.float64).norm())
            if 0.0 < norm < math.inf:
                found.setdefault((stage, name), {})[step] = math.sqrt(total) / norm
        return found

    def _usual(self, key: Key) -> float:
        """Return the root mean square over steps of a tensor's error / ||S||.

        In a free run over the steps until this one: noise grows.
        """
        step, stage, name = key
        known = self._relative.get((stage, name), {})
        squares = [r * r for s, r in known.items() if s <= step or not self.is_free]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def _stage(
        self, step: int, stage: str, parts: Mapping[str, Tensor], updates: UpdateNoise
    ) -> dict[Key, Floor]:
        """Return the floors of one stage of one step."""
        expected = self.ensemble.expected[step].get(stage, {})
        values = {
            name: value
            for name, value in self.ensemble.exact[step].get(stage, {}).items()
            if name in expected and is_rounding(expected[name])
        }
        scales = {
            (step, stage, name): parts.get(name, value).abs() for name, value in values.items()
        }
        relative = median_relative(self.ensemble, scales)
        siblings = _siblings_rms(stage, values, self.ensemble.exact[0]["initial_state"])
        found: dict[Key, Floor] = {}
        for key, scale in scales.items():
            name = key[2]
            dtype = str(expected[name].dtype).removeprefix("torch.")
            floor = found[key] = base_floor(
                self.ensemble, key, dtype, scale, relative, self._usual(key)
            )
            if stage == "parameters":
                updates.widen_parameter(step, name, floor)
            elif stage == "optimizer_state":
                updates.widen_state(step, name, floor)
            sibling = siblings.get(_family(stage, name), 0.0)
            judge_usable(floor, dtype, values[name], sibling, self.place)
        return found


def start_updates(ensemble: Ensemble) -> UpdateNoise:
    """Return the follower of a free run before its first step."""
    return UpdateNoise(ensemble, ensemble.exact[0]["initial_state"])


def follow_updates(
    ensemble: Ensemble, scales: Sequence[Mapping[str, Mapping[str, Tensor]]], roundoff: float
) -> UpdateNoise:
    """Follow the noise of gradients into parameters over all steps of a free run."""
    updates = start_updates(ensemble)
    for step in range(len(ensemble.exact)):
        updates.advance(step, scales[step]["gradients"] if scales else {}, roundoff)
    return updates


def _siblings_rms(
    stage: str, values: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the root mean square of each family of values used together.

    Of parameters it is that of how far they have moved, which is what noise stands beside.
    """
    families: dict[str, list[Tensor]] = {}
    if stage == "parameters":
        moved = [value - initial[name] for name, value in values.items() if name in initial]
        return {stage: rms(moved)}
    if stage in ("gradients", "optimizer_state"):
        for name, value in values.items():
            families.setdefault(_family(stage, name), []).append(value)
    return {family: rms(members) for family, members in families.items()}


def _family(stage: str, name: str) -> str:
    """Return what a value is a sibling of: all gradients, or one key of optimizer state."""
    return name.rsplit(".", 1)[-1] if stage == "optimizer_state" else stage
