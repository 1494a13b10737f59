"""What a per-rank style promises of an update: one device's, made from the mean of the ranks.

The style promises gradients (`semantic`). Clipping, optimizer state and parameters then are what
the case's own step makes of them on one device, from the state before it: that is run, in
float64, and a tensor of the ranks is right where it is that within its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.part_runs import RAW
from spmd_verify.examination.semantic import PerRank, allowance, combination
from spmd_verify.layouts import Coordinate, Region, take_region
from spmd_verify.norms import as_real, is_rounding
from spmd_verify.record import Row
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.stored.store import Store
from spmd_verify.verdict import limit, unit_roundoff

# What an update is seen in, in the order of a step.
UPDATE_STAGES: Final = ("clipping", "optimizer_state", "parameters")


@dataclass(frozen=True)
class Promise:
    """One promised step.

    Attributes:
        exact: Its update stages in float64.
        rounded: The same in the case's dtype.
        nearby: The same in float64 from gradients that are off by what is noise of them: where
            an optimizer divides by a gradient that is zero within its noise, these are far off.
    """

    exact: StepRecord
    rounded: StepRecord
    nearby: list[StepRecord] = field(default_factory=list)

    def value(self, stage: str, name: str) -> Tensor | None:
        """Return a promised tensor, float64; None where the step has none."""
        found = self.exact.get(stage, {}).get(name)
        return None if found is None else as_real(found).to(torch.float64)

    def spread(self, stage: str, name: str) -> Tensor:
        """Return by how much the noise of gradients moves each element."""
        exact = self.value(stage, name)
        assert exact is not None, "only asked for what is promised"
        found = torch.zeros_like(exact)
        for record in self.nearby:
            other = record.get(stage, {}).get(name)
            if other is not None and other.numel():
                moved = (as_real(other).to(torch.float64) - exact).abs()
                found = torch.maximum(found, moved.nan_to_num(nan=0.0, posinf=0.0))
        return found

    def tolerance(self, stage: str, name: str, dtype: str, noise: float) -> float:
        """Return the error that is noise of the update's own arithmetic, as a norm."""
        exact, rounded = self.value(stage, name), self.rounded.get(stage, {}).get(name)
        assert exact is not None, "only asked for what is promised"
        if rounded is None or not is_rounding(rounded):
            return 0.0
        error = float((as_real(rounded).to(torch.float64) - exact).norm())
        least = 2.0 * unit_roundoff(dtype) * float(exact.norm())
        return limit(dtype, "tensor") * max(error, least, noise)


def promise(exhibit: Exhibit, known: PerRank) -> Promise | None:
    """Return the update that the style promises in the exhibit's step; None if it cannot be run.

    Args:
        exhibit: The cell, at the step.
        known: Its parts, whose gradients the ranks hold the mean of.
    """
    # A step that gives parameters their gradients itself leaves nothing behind backward.
    stage = RAW if all(part.get(RAW) for part in known.parts.values()) else "gradients"
    exact, low = _mean(known, known.parts, stage), _mean(known, known.rounded, stage)
    if exact.keys() != low.keys():
        return None
    at_update, runs, batch = stage != RAW, exhibit.runs, exhibit.batch
    found = runs.updated(batch, exact, at_update=at_update)
    plain = runs.updated(batch, low, in_float64=False, at_update=at_update)
    if found is None or plain is None:
        return None
    noise = {name: _noise(known, name, value, low[name]) for name, value in exact.items()}
    nearby = []
    for signs in (1.0, -1.0, None):
        gradients = {name: value + _signed(noise[name], signs) for name, value in exact.items()}
        other = runs.updated(batch, gradients, at_update=at_update)
        if other is None:
            return None
        nearby.append(other)
    return Promise(found, plain, nearby)


def _mean(known: PerRank, parts: Mapping[Coordinate, StepRecord], stage: str) -> dict[str, Tensor]:
    """Return the weighted sum over ranks of every gradient that some rank has, float64."""
    found: dict[str, Tensor] = {}
    for at, record in parts.items():
        for name, value in record.get(stage, {}).items():
            wide = torch.complex128 if value.is_complex() else torch.float64
            share = known.weights[at] * value.to(wide)
            found[name] = found[name] + share if name in found else share
    return found


def _noise(known: PerRank, name: str, exact: Tensor, rounded: Tensor) -> Tensor:
    """Return by how much each element of a promised gradient may be off, same shape."""
    norm = float((rounded - exact).abs().norm())
    if name in known.gradients:
        observed = combination(known, name)
        size = float(observed.abs().norm())
        # A step may scale what backward leaves before it is observed.
        scale = float(exact.abs().norm()) / size if size else 1.0
        norm = max(norm, scale * allowance(known, name, observed))
    each = norm / max(exact.numel(), 1) ** 0.5
    return ((exact != 0) | (rounded != 0)).to(torch.float64) * each


def _signed(noise: Tensor, sign: float | None) -> Tensor:
    """Return noise with one sign, or with alternating ones."""
    if sign is not None:
        return sign * noise
    signs = 1.0 - 2.0 * (torch.arange(noise.numel()) % 2).to(torch.float64)
    return noise * signs.reshape(noise.shape)


class PromisedStore(Store):
    """A reference whose update in one step is the promised one."""

    def __init__(self, store: Store, step: int, record: StepRecord) -> None:
        """Lay a record over a step of a store."""
        self.__dict__.update(store.__dict__)
        self._promised = {
            (step, stage, name): value
            for stage in ("gradients", *UPDATE_STAGES)
            for name, value in record.get(stage, {}).items()
            if store.entry(step, stage, name) is not None
        }

    def expected(self, step: int, stage: str, name: str, part: Region | None = None) -> Tensor:
        """Return what is promised, in float64, else what the reference has."""
        value = self._promised.get((step, stage, name))
        if value is None:
            return super().expected(step, stage, name, part)
        return value if part is None else take_region(value, part).contiguous()

    def exact(
        self, run: str, step: int, stage: str, name: str, part: Region | None = None
    ) -> Tensor:
        """Return the same."""
        if (step, stage, name) in self._promised:
            return self.expected(step, stage, name, part)
        return super().exact(run, step, stage, name, part)


@dataclass(frozen=True)
class Held:
    """A tensor of the ranks beside what is promised.

    Attributes:
        error: Beyond what the noise of gradients does, as a norm; inf where it is not there.
        tolerance: What is noise of it.
        ranks: Who holds something else.
        copies_differ: Whether ranks that should hold the same do not.
    """

    error: float
    tolerance: float
    ranks: list[int]
    copies_differ: bool

    @property
    def is_right(self) -> bool:
        """Say whether it is what is promised."""
        return self.error <= self.tolerance and not self.copies_differ


def held(exhibit: Exhibit, promised: Promise, row: Row) -> Held:
    """Return how far what the ranks hold of a tensor is from the promise.

    Args:
        exhibit: With the promised store.
        promised: The promise.
        row: Of an update stage in the exhibit's step.
    """
    value, locals_ = promised.value(row.stage, row.name), exhibit.locals(row)
    everyone = [exhibit.rank_of(at) for at in locals_]
    if value is None or not locals_ or not exhibit.is_known(row):
        return Held(math.inf, 0.0, everyone, copies_differ=False)
    spread = promised.spread(row.stage, row.name)
    tolerance = promised.tolerance(row.stage, row.name, row.dtype, row.noise or 0.0)
    whole = sum(math.prod(part.shape) for part in exhibit.regions(row))
    if whole != math.prod(row.shape) or sum(map(len, exhibit.regions(row).values())) < len(locals_):
        return Held(math.inf, tolerance, everyone, copies_differ=False)
    squares, ranks, differ = 0.0, list[int](), False
    for part, coordinates in exhibit.regions(row).items():
        due, free = take_region(value, part), take_region(spread, part)
        errors = {at: _beyond(locals_[at], due, free) for at in coordinates}
        ranks += [exhibit.rank_of(at) for at, e in errors.items() if not e <= tolerance]
        squares += max(math.inf if math.isnan(e) else e for e in errors.values()) ** 2
        first = locals_[coordinates[0]]
        differ |= any(not float((locals_[at] - first).norm()) <= tolerance for at in coordinates)
    return Held(math.sqrt(squares), tolerance, sorted(ranks) or everyone, differ)


def _beyond(local: Tensor, due: Tensor, free: Tensor) -> float:
    """Return how far a tensor is from what is due, beyond what each element is free to be off."""
    return float(((local - due).abs() - free).clamp(min=0.0).norm())
