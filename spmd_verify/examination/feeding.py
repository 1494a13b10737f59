"""Say what of the reference may be fed in at which boundary of a failing cell's modules.

Works on what every rank's boundaries saw (`runner.fed`) and on two runs of the step on one
device, in float64 and in the case's dtype. Design: docs/design.md 3.11.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_verify.causes.exhibit import subsets
from spmd_verify.causes.part_runs import PartRuns
from spmd_verify.compare import layouts
from spmd_verify.layouts import Coordinate, Region, is_sharded, region, take_region
from spmd_verify.runner.fed import fed_path, seen_path
from spmd_verify.runner.jobs import loaded
from spmd_verify.runner.specs import (
    Boundary,
    CellSpec,
    Feeding,
    FeedingPlan,
    FeedingRequest,
    decode,
    encode,
)
from spmd_verify.runner.worker import Context, job
from spmd_verify.stored.store import Store
from spmd_verify.styles.base import mesh_coordinates
from spmd_verify.verdict import unit_roundoff

# A boundary has no noise runs of its own: it is right up to so many times the one error that
# is measured there, or twice the roundoff of its norm. Only what to feed depends on it, never
# a verdict.
_MARGIN: Final = 8.0
# Parts of another dim than the samples': their layout counts as known where the deviation is at
# most this share of the tensor. Elements in another order deviate by about 1.4.
_PLAUSIBLE: Final = 0.5


@job
def plan_feeding(context: Context, payload: bytes) -> bytes:
    """Explain every boundary and write what may be fed: `FeedingRequest -> FeedingPlan`."""
    cell = decode(payload, FeedingRequest).cell
    feeding = cell.feeding
    assert feeding is not None, "the request is about one"
    case = loaded(context, cell.case)
    runs = PartRuns(case, Store(cell.store_path), feeding.run, feeding.step)
    exact, plain = runs.boundaries(), runs.boundaries(in_float64=False)
    if exact is None or plain is None:
        return encode(FeedingPlan([], problem=runs.failures[0]))
    wanted = "values" if feeding.direction == "values" else "gradients"
    roundoff = unit_roundoff(cell.case.dtype)
    order = list(exact.values)
    sites = _Sites(
        cell.axes,
        _seen(cell, feeding),
        references={key: value.double() for key, value in getattr(exact, wanted).items()},
        errors={
            key: max(_distance(value, plain_value), 2.0 * roundoff * float(value.norm()))
            for key, value in getattr(exact, wanted).items()
            if (plain_value := getattr(plain, wanted).get(key)) is not None
            and plain_value.shape == value.shape
        },
        order=order if wanted == "values" else order[::-1],
        is_scaled=wanted == "gradients",
    )
    found = sites.boundaries()
    for rank, at in enumerate(sites.coordinates):
        save_file(sites.fed(at), fed_path(feeding.folder, rank))
    return encode(
        FeedingPlan(
            found if wanted == "values" else found[::-1],
            [sites.scales[at] for at in sites.coordinates],
        )
    )


def _seen(cell: CellSpec, feeding: Feeding) -> dict[Coordinate, dict[str, Tensor]]:
    """Return what passed the boundaries of every rank, in the direction of flow."""
    prefix = f"{feeding.direction}|"
    found = {}
    for rank, coordinate in enumerate(mesh_coordinates(cell.axes)):
        held = load_file(seen_path(feeding.folder, rank))
        found[coordinate] = {
            key.removeprefix(prefix): value.double()
            for key, value in held.items()
            if key.startswith(prefix)
        }
    return found


@dataclass(frozen=True)
class _Fit:
    """One reading of a boundary.

    Attributes:
        error: The largest norm of a rank's deviation from it.
        parts: By coordinate, the part of the reference.
        finding: See `specs.Boundary`.
        is_certain: Whether it is the layout of whatever has that shape, right or wrong.
    """

    error: float
    parts: dict[Coordinate, Region]
    finding: str
    is_certain: bool = False


@dataclass
class _Sites:
    """All boundaries of one step.

    Attributes:
        axes: Mesh axes, `{name: ranks}`.
        seen: By coordinate and key, what ranks held; local, float64.
        references: By key, the global tensor, float64.
        errors: By key, the noise that one device shows, as a norm.
        order: All keys in the direction of flow.
        is_scaled: Whether ranks may have multiples of the reference's by convention.
    """

    axes: Mapping[str, int]
    seen: Mapping[Coordinate, Mapping[str, Tensor]]
    references: Mapping[str, Tensor]
    errors: Mapping[str, float]
    order: Sequence[str]
    is_scaled: bool
    _fits: dict[str, _Fit | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note the coordinates, in rank order."""
        self.shape = tuple(self.axes.values())
        self.coordinates = list(self.seen)

    def keys(self) -> list[str]:
        """Return the boundaries that every rank and one device have."""
        return [
            key
            for key in self.order
            if key in self.errors and all(key in held for held in self.seen.values())
        ]

    def boundaries(self) -> list[Boundary]:
        """Return every boundary with what it is, in the direction of flow."""
        found: list[Boundary] = []
        before: str | None = None
        for key in self.keys():
            fit = self.fit(key)
            found.append(
                Boundary(
                    key,
                    "unknown" if fit is None else fit.finding,
                    self._tolerance(key),
                    is_repeated=before is not None and self._is_same(key, before),
                )
            )
            before = key
        return found

    def fed(self, at: Coordinate) -> dict[str, Tensor]:
        """Return what may be fed to a rank, by key; a summand is fed as the whole sum."""
        found = {}
        for key in self.keys():
            fit = self.fit(key)
            if fit is not None:
                value = take_region(self.references[key], fit.parts[at]) * self.scales[at]
                found[key] = value.contiguous().clone()
        return found

    @cached_property
    def scales(self) -> dict[Coordinate, float]:
        """Return by what each rank's tensors are multiples of the reference's.

        Read off the first boundary in the direction of flow that is a multiple up to noise: a
        style that takes a mean over ranks later has gradients as many times as large. 1.0
        where there is none.
        """
        if not self.is_scaled:
            return dict.fromkeys(self.coordinates, 1.0)
        found = {}
        for at in self.coordinates:
            scales = (self._scale(key, at) for key in self.keys())
            found[at] = next((scale for scale in scales if scale is not None), 1.0)
        return found

    def _scale(self, key: str, at: Coordinate) -> float | None:
        """Return the factor of one tensor, None where it is no multiple."""
        local, whole = self.seen[at][key], self.references[key]
        for layout in layouts(tuple(whole.shape), self.shape):
            part = region(tuple(whole.shape), layout, self.shape, at)
            if part.shape != tuple(local.shape) or local.numel() < 2:
                continue
            due = take_region(whole, part)
            power = float(due.square().sum())
            k = float((local * due).sum()) / power if power else 0.0
            noise = _MARGIN * self.errors[key] * abs(k)
            if k and float((local - k * due).norm()) <= noise:
                return k
        return None

    def fit(self, key: str) -> _Fit | None:
        """Return the reading of a boundary that leaves least; None where nobody can say."""
        if key not in self._fits:
            fits = list(self._readings(key))
            best = min(fits, key=lambda fit: fit.error, default=None)
            if best is not None and best.error > self._tolerance(key):
                best = self._guess(key, fits, best)
            self._fits[key] = best
        return self._fits[key]

    def _guess(self, key: str, fits: list[_Fit], best: _Fit) -> _Fit | None:
        """Return how a boundary that is wrong is laid out, None where that is not known.

        One that every rank holds whole may be wrong or a summand of something wrong: it is
        `doubtful`.
        """
        certain = [fit for fit in fits if fit.is_certain]
        if len(certain) == 1:
            return replace(certain[0], finding="wrong")
        is_split = best.finding == "right" and len(set(best.parts.values())) == len(best.parts)
        if is_split and best.error <= _PLAUSIBLE * float(self.references[key].norm()):
            return replace(best, finding="wrong")
        whole = [fit for fit in fits if fit.finding == "right"]
        return replace(whole[0], finding="doubtful") if len(whole) == 1 else None

    def _readings(self, key: str) -> Iterator[_Fit]:
        """Give what a boundary may be: a part per rank, or a summand of one."""
        whole = self.references[key]
        held = {at: values[key] for at, values in self.seen.items()}
        for layout in layouts(tuple(whole.shape), self.shape):
            parts = {at: region(tuple(whole.shape), layout, self.shape, at) for at in held}
            if any(parts[at].shape != tuple(local.shape) for at, local in held.items()):
                continue
            due = {at: take_region(whole, part) * self.scales[at] for at, part in parts.items()}
            error = max(_distance(held[at], due[at]) for at in held)
            yield _Fit(error, parts, "right", self._is_certain(key, layout, parts))
            free = [
                axis
                for axis, placement in zip(self.axes, layout, strict=True)
                if not is_sharded(placement) and self.axes[axis] > 1
            ]
            for axes in subsets(free):
                sums = self._summed(held, axes)
                error = max(_distance(sums[at], due[at]) for at in held)
                yield _Fit(error, parts, "summand")

    def _is_certain(self, key: str, layout: Any, parts: Mapping[Coordinate, Region]) -> bool:
        """Say whether a wrong tensor must be laid out so: copies agree, or samples are split."""
        copies: dict[Region, Tensor] = {}
        for at, part in parts.items():
            first = copies.setdefault(part, self.seen[at][key])
            if _distance(first, self.seen[at][key]) > self._tolerance(key):
                return False
        dims = {placement.dim for placement in layout if is_sharded(placement)}
        return dims <= {0}

    def _summed(
        self, held: Mapping[Coordinate, Tensor], axes: Sequence[str]
    ) -> dict[Coordinate, Tensor]:
        """Return the sums over the ranks of some axes."""
        names = list(self.axes)
        kept = [i for i, name in enumerate(names) if name not in axes]
        groups: dict[Coordinate, Tensor] = {}
        for at, local in held.items():
            group = tuple(at[i] for i in kept)
            groups[group] = groups[group] + local if group in groups else local
        return {at: groups[tuple(at[i] for i in kept)] for at in held}

    def _tolerance(self, key: str) -> float:
        """Return the error that is noise, as a norm."""
        return _MARGIN * self.errors[key] * max(abs(scale) for scale in self.scales.values())

    def _is_same(self, key: str, other: str) -> bool:
        """Say whether two boundaries saw the same bits on every rank."""
        return all(torch.equal(held[key], held[other]) for held in self.seen.values())


def _distance(left: Tensor, right: Tensor) -> float:
    """Return the norm of a difference; inf where it is not finite."""
    distance = float((left.double() - right.double()).norm())
    return distance if math.isfinite(distance) else math.inf
