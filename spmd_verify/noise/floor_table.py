"""The floors of all tensors of one run, from its ensemble of noise runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from spmd_verify.noise.floors import (
    Ensemble,
    Floor,
    Key,
    Scale,
    base_floor,
    judge_usable,
    median_relative,
    rms,
)
from spmd_verify.noise.ill_conditioned import UpdateNoise
from spmd_verify.norms import is_rounding
from spmd_verify.verdict import CARRIED_STAGES, STAGES

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
        is_wanted: Says of a step, stage and name whether its floor is; all are without it.
        undetermined: Parameter elements whose update only rounding decides, after `build`.
    """

    ensemble: Ensemble
    scales: Scales
    place: str
    roundoff: float
    is_free: bool
    is_wanted: Callable[[int, str, str], bool] | None = None
    undetermined: Mapping[str, Tensor] = field(default_factory=dict)
    _relative: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    _scales: dict[Key, Scale] = field(default_factory=dict)

    def build(self) -> dict[Key, Floor]:
        """Return the floor of every tensor that rounds and is wanted."""
        updates = start_updates(self.ensemble)
        self._relative = self._relative_noise()
        found: dict[Key, Floor] = {}
        for step in range(len(self.ensemble.exact)):
            if step and not self.is_free:
                updates = UpdateNoise(self.ensemble, self.ensemble.expected[step - 1]["parameters"])
            if self.is_free or any(self._wanted(step, stage) for stage in CARRIED_STAGES):
                parts = self.scales[step].get("gradients", {}) if self.scales else {}
                updates.advance(step, parts, self.roundoff)
            for stage in STAGES:
                found.update(self._stage(step, stage, updates))
        self.undetermined = updates.undetermined
        return found

    def _wanted(self, step: int, stage: str) -> list[str]:
        """Return the names of a stage that round and are wanted."""
        if stage in COPIED_STAGES:
            return []
        expected = self.ensemble.expected[step].get(stage, {})
        return [
            name
            for name in self.ensemble.exact[step].get(stage, {})
            if name in expected
            and is_rounding(expected[name])
            and (self.is_wanted is None or self.is_wanted(step, stage, name))
        ]

    def _scale(self, key: Key) -> Scale:
        """Return S of a tensor, or the float64 reference where the parts of it are unknown."""
        if key not in self._scales:
            step, stage, name = key
            parts = self.scales[step].get(stage, {}) if self.scales else {}
            value = parts.get(name)
            self._scales[key] = Scale.of(
                self.ensemble.exact[step][stage][name] if value is None else value
            )
        return self._scales[key]

    def _relative_noise(self) -> dict[tuple[str, str], dict[int, float]]:
        """Return error / ||S|| of every tensor by step."""
        found: dict[tuple[str, str], dict[int, float]] = {}
        for (step, stage, name), total in self.ensemble.total.items():
            scale = self._scale((step, stage, name))
            if scale.is_finite and scale.whole > 0.0:
                found.setdefault((stage, name), {})[step] = math.sqrt(total) / scale.whole
        return found

    def _usual(self, key: Key) -> float:
        """Return the root mean square over steps of a tensor's error / ||S||.

        In a free run over the steps until this one: noise grows.
        """
        step, stage, name = key
        known = self._relative.get((stage, name), {})
        squares = [r * r for s, r in known.items() if s <= step or not self.is_free]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def _stage(self, step: int, stage: str, updates: UpdateNoise) -> dict[Key, Floor]:
        """Return the floors of one stage of one step."""
        expected, exact = self.ensemble.expected[step], self.ensemble.exact[step]
        names = self._wanted(step, stage)
        if not names:
            return {}
        values = {
            name: value
            for name, value in exact[stage].items()
            if name in expected[stage] and is_rounding(expected[stage][name])
        }
        scales = {(step, stage, name): self._scale((step, stage, name)) for name in values}
        relative = median_relative(self.ensemble, scales)
        siblings = _siblings_rms(stage, values, self.ensemble.exact[0]["initial_state"])
        found: dict[Key, Floor] = {}
        for name in names:
            key = (step, stage, name)
            dtype = str(expected[stage][name].dtype).removeprefix("torch.")
            floor = found[key] = base_floor(
                self.ensemble, key, dtype, scales[key], relative, self._usual(key)
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
