"""From noise runs to noise floors, per tensor and per dim-0 row. Normative: verdicts.md 3, 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.norms import (
    LARGEST_STACKED,
    as_real,
    can_be_stacked,
    finite_deviation,
    is_rounding,
    rows_of,
    stacked,
)
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.verdict import (
    limit,
    noise_floor,
    too_few_decided,
    unit_roundoff,
    usable_floor,
)

Key = tuple[int, str, str]  # step, stage, name

# Tensors of at most this many elements also get the median relative floor of their stage:
# the largest of half a dozen draws of one number is no bound for the next (verdicts.md part 3:
# 1.8 % false alarms on 1-element biases with a plain maximum).
FEW_ELEMENTS: Final = 16
# What a tensor's other steps may raise its floor by: four draws of one normal number are all
# below a quarter of its deviation once in 700 times, and below a tenth once in 25,000.
MOST_RAISED: Final = 4.0
# An element whose update only rounding decides moves at least this many u of the root mean
# square update of the model; smaller ones carry their noise on proportionally. SGD makes of a
# zero gradient up to 100 u of it, Adam all of it in float32 and 1e6 u in float64, where its
# eps of 1e-8 is far above the noise.
AMPLIFIED: Final = 1e4
# A value that is zero within its noise is decided when the noise is this small beside the
# root mean square of its siblings (gradients of the model; one key of optimizer state).
NEGLIGIBLE_SHARE: Final = 1e-4


@dataclass
class Floor:
    """The noise of one tensor at one stage of one step.

    Attributes:
        noise: Floor of the Frobenius norm over the rows that are decided.
        noise_rows: Floor of every dim-0 row, float64 [rows].
        scale: `||S||`.
        scale_rows: Norm of S by row, float64 [rows].
        undetermined_rows: Rows that hold an element which only rounding decides, bool [rows];
            they are judged by their own floor alone. None where there are none.
        undetermined_elements: How many such elements moved enough to decide nothing.
        reason: Why the floor decides nothing, if it does not.
    """

    noise: float
    noise_rows: Tensor
    scale: float
    scale_rows: Tensor
    undetermined_rows: Tensor | None = None
    undetermined_elements: int = 0
    reason: str | None = None

    def decides(self, count: int) -> bool:
        """Say whether the floor tells right from wrong in a tensor of `count` elements."""
        return self.reason is None and not too_few_decided(self.undetermined_elements, count)


@dataclass
class _Stack:
    """Tensors of one shape and dtype that all runs have.

    Attributes:
        centres: What their errors are against, float64 [tensors, elements].
        rows: The largest squared errors, float64 [tensors, rows]; those of the ensemble are
            views of it. None where other stacks hold some of them.
        elements: Likewise the largest absolute errors, float64 [tensors, elements].
    """

    centres: Tensor
    rows: Tensor | None = None
    elements: Tensor | None = None


@dataclass
class Ensemble:
    """Largest squared errors seen so far against one float64 trajectory.

    Attributes:
        exact: The float64 reference, or the reference in the case's dtype where that is absent.
        expected: The reference in the case's dtype.
        rows: Largest squared error by row, float64 [rows].
        total: Largest squared error of the tensor.
        elements: Largest absolute error by element, for stages of which it is kept.
    """

    exact: Sequence[StepRecord]
    expected: Sequence[StepRecord]
    rows: dict[Key, Tensor] = field(default_factory=dict)
    total: dict[Key, float] = field(default_factory=dict)
    elements: dict[Key, Tensor] = field(default_factory=dict)
    _stacks: dict[tuple[Key, ...], _Stack] = field(default_factory=dict)
    _memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    def add(
        self,
        steps: Sequence[StepRecord],
        *,
        stages: Iterable[str],
        by_element: Iterable[str] = (),
        left_out: frozenset[str] = frozenset(),
        first: int = 0,
    ) -> None:
        """Take one run into the maxima.

        Args:
            steps: The run; a stage it lacks is skipped.
            stages: Stages in which this run counts.
            by_element: Stages of which element maxima are kept.
            left_out: Names that do not count for this run.
            first: The first step that counts.
        """
        kept = frozenset(by_element)
        alike: dict[Any, list[tuple[Key, Tensor, Tensor]]] = {}
        for index, record in enumerate(steps[first:], first):
            for stage in stages:
                for name, value in record.get(stage, {}).items():
                    centre = self.exact[index].get(stage, {}).get(name)
                    if centre is None or name in left_out or value.shape != centre.shape:
                        continue
                    if not is_rounding(value):
                        continue
                    key = (index, stage, name)
                    if can_be_stacked(value, centre):
                        kind = value.shape, value.dtype, centre.dtype, stage, stage in kept
                        alike.setdefault(kind, []).append((key, value, centre))
                    else:
                        self._add_one(key, value, centre, stage in kept)
        for (shape, *_, by_elements), group in alike.items():
            size = len(group) if shape.numel() <= LARGEST_STACKED else 1
            for start in range(0, len(group), size):
                self._add_alike(group[start : start + size], by_elements)

    def take_step(self, other: Ensemble, step: int, stages: Iterable[str]) -> None:
        """Take the maxima of another ensemble at a step that both have in common."""
        wanted = frozenset(stages)
        for key, squares in other.rows.items():
            if key[0] == step and key[1] in wanted:
                size = other.elements.get(key)
                kept = None if size is None else size.clone()
                self._take(key, squares.clone(), other.total[key], kept)

    def _add_alike(self, group: Sequence[tuple[Key, Tensor, Tensor]], by_element: bool) -> None:
        """Take tensors of one shape and dtype into the maxima: the bits of `_add_one`."""
        stack = self._stack_of(group)
        shape = group[0][1].shape
        difference = self._work(len(group), shape.numel())
        for line, (_, value, _) in zip(difference.unbind(), group, strict=True):
            line.view(shape).copy_(value)
        difference.sub_(stack.centres)
        parts = difference.view(len(group), shape[0] if shape else 1, -1)
        rows = torch.linalg.vector_norm(parts, dim=2).square_()
        totals = rows.sum(1).tolist()
        is_finite = all(map(math.isfinite, totals))
        size = difference.abs_() if by_element and is_finite else None
        if is_finite and stack.rows is not None:
            torch.maximum(stack.rows, rows, out=stack.rows)
            if size is not None and stack.elements is not None:
                torch.maximum(stack.elements, size, out=stack.elements)
            for (key, _, _), total in zip(group, totals, strict=True):
                self.total[key] = max(self.total[key], total)
            return
        if is_finite and not any(key in self.rows for key, _, _ in group):
            size = None if size is None else size.clone()
            stack.rows, stack.elements = rows, size
        elif size is not None:
            size = size.clone()
        for at, ((key, value, centre), total) in enumerate(zip(group, totals, strict=True)):
            if is_finite:
                self._take(key, rows[at], total, None if size is None else size[at].view(shape))
            else:
                self._add_one(key, value, centre, by_element)

    def _work(self, count: int, elements: int) -> Tensor:
        """Return memory to work in, float64 [count, elements]; overwritten by the next call.

        Fresh memory takes longer than what is computed in it.
        """
        size = count * elements
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.float64)
        return self._memory[:size].view(count, elements)

    def _stack_of(self, group: Sequence[tuple[Key, Tensor, Tensor]]) -> _Stack:
        """Return the stack of some tensors, made when they are first met together."""
        keys = tuple(key for key, _, _ in group)
        if keys not in self._stacks:
            centres = stacked([centre for _, _, centre in group]).to(torch.float64)
            self._stacks[keys] = _Stack(centres)
        return self._stacks[keys]

    def _add_one(self, key: Key, value: Tensor, centre: Tensor, by_element: bool) -> None:
        """Take one tensor into the maxima."""
        difference = as_real(value).to(torch.float64) - as_real(centre).to(torch.float64)
        squares = _squares_by_row(difference, value)
        if not math.isfinite(total := float(squares.sum())):
            expected = self.expected[key[0]].get(key[1], {}).get(key[2])
            difference = finite_deviation(value, centre, expected)
            squares = _squares_by_row(difference, value)
            total = float(squares.sum())
        by_element = by_element and not value.is_complex()
        self._take(key, squares, total, difference.abs_() if by_element else None)

    def _take(self, key: Key, squares: Tensor, total: float, size: Tensor | None) -> None:
        """Take squared errors by row, their sum, and absolute errors into the maxima."""
        if key in self.rows:
            torch.maximum(self.rows[key], squares, out=self.rows[key])
            self.total[key] = max(self.total[key], total)
        else:
            self.rows[key], self.total[key] = squares, total
        if size is not None:
            known = self.elements.get(key)
            if known is None:
                self.elements[key] = size
            else:
                torch.maximum(known, size, out=known)


def _squares_by_row(difference: Tensor, value: Tensor) -> Tensor:
    """Return sums of squares by dim-0 row of `value`, whose complex entries are [..., 2]."""
    return _row_norms(difference, value).square_()


def _row_norms(real: Tensor, value: Tensor) -> Tensor:
    """Return norms by dim-0 row of `value`, given as real numbers; none for no rows."""
    return torch.linalg.vector_norm(rows_of(real) if value.ndim else real.reshape(1, -1), dim=1)


@dataclass
class Scale:
    """The size of what a tensor was added up from.

    Attributes:
        rows: Norm of S by row, float64 [rows].
        whole: `||S||`.
        numel: Elements of the tensor.
        is_finite: Whether all elements are; those that are not count nothing.
    """

    rows: Tensor
    whole: float
    numel: int
    is_finite: bool

    @classmethod
    def of(cls, value: Tensor) -> Scale:
        """Measure S, or what stands in for it."""
        real = as_real(value).to(torch.float64)
        rows = _row_norms(real, value)
        whole = float(torch.linalg.vector_norm(rows))
        if math.isfinite(whole):
            return cls(rows, whole, value.numel(), True)
        rows = _row_norms(real.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), value)
        return cls(rows, float(torch.linalg.vector_norm(rows)), value.numel(), False)


def base_floor(
    ensemble: Ensemble, key: Key, dtype: str, scale: Scale, relative: float, usual: float = 0.0
) -> Floor:
    """Return the floor of one tensor from the runs and S alone.

    A row's floor is the largest of its own errors, `2 u ||S_row||`, and the tensor's
    relative noise applied to that row's S: the rows of one tensor come from one computation.
    Rows of few elements also get an equal share of the tensor's noise, unless nothing ever
    reached them (a row of an embedding that no token used stays exact).

    Args:
        ensemble: The runs.
        key: Which tensor.
        dtype: The case's dtype, or the tensor's where that is coarser.
        scale: S of the tensor.
        relative: Median relative floor of the stage, used for tensors of few elements.
        usual: Typical relative error of this tensor over the steps. Where one channel makes
            all of the noise, half a dozen draws can all be small; other steps say so.
    """
    u, whole, numel, count = unit_roundoff(dtype), scale.whole, scale.numel, len(scale.rows)
    seen = math.sqrt(ensemble.total.get(key, 0.0))
    noise = noise_floor([seen, min(usual * whole, MOST_RAISED * seen)], u, whole)
    if numel <= FEW_ELEMENTS:
        noise = max(noise, few_draws(numel) * relative * whole)
    own = ensemble.rows.get(key)
    spread = few_draws(numel // max(count, 1))
    rows = scale.rows * max(2.0 * u, spread * noise / whole if whole > 0.0 else 0.0)
    if own is not None:
        rows = torch.maximum(rows, own.sqrt(), out=rows)
    if count and (numel <= FEW_ELEMENTS * count or noise > 0.1 * whole):
        # Above a tenth S is itself noise and cannot say which rows are noisy.
        share = spread * noise / math.sqrt(count)
        rows = torch.where(rows > 0, rows.clamp(min=share), rows)
    return Floor(noise, rows, whole, scale.rows)


def few_draws(elements: int) -> float:
    """Return by how much a typical norm is raised to bound one over `elements` elements.

    `1 + 1 / m`: a single normal draw exceeds c = 4 deviations once in 16,000, and a cell has
    that many 1-element rows; twice that is never seen. Norms over many elements hardly
    scatter. Measured: without it 1 of 1,126 clean candidates had one row at 4.00.
    """
    return 1.0 + 1.0 / max(elements, 1)


def median_relative(ensemble: Ensemble, scales: Mapping[Key, Scale]) -> float:
    """Return the median of error / ||S|| over the tensors of one stage and step."""
    found = [
        math.sqrt(ensemble.total[key]) / scale.whole
        for key, scale in scales.items()
        if key in ensemble.total and scale.is_finite and scale.whole > 0.0
    ]
    # The lower one of two in the middle.
    return sorted(found)[(len(found) - 1) // 2] if found else 0.0


def judge_usable(floor: Floor, dtype: str, value: Tensor, siblings_rms: float, place: str) -> None:
    """Set `floor.reason` where the floor is too high to decide anything, in place.

    A value that is zero within its noise, with noise that is negligible beside its
    siblings, is decided: both sides agree that it is zero. What was added up cancelled, so
    its siblings stand in for S.

    Args:
        floor: The floor.
        dtype: Of the tensor in the case.
        value: Float64 reference of the tensor.
        siblings_rms: Root mean square of the values this one is used together with.
        place: What the reason names, such as a cast to float32; may be empty.
    """
    if floor.noise <= usable_floor(dtype) * floor.scale or floor.noise == 0.0:
        return
    is_zero = rms([value]) * math.sqrt(value.numel()) <= limit(dtype, "tensor") * floor.noise
    around = siblings_rms * math.sqrt(value.numel())
    if is_zero and floor.noise <= NEGLIGIBLE_SHARE * around:
        floor.scale = max(floor.scale, around)
        return
    share = floor.noise / floor.scale if floor.scale else math.inf
    because = f" ({place})" if place else ""
    floor.reason = (
        f"the noise floor is {share:.1e} of the value{because}; "
        f"a float64 run or a larger gradient would decide"
    )


def rms(values: Iterable[Tensor]) -> float:
    """Return the root mean square over all elements of several tensors."""
    total, count = 0.0, 0
    for value in values:
        real = as_real(value)
        total += float(torch.linalg.vector_norm(real.to(torch.float64))) ** 2
        count += real.numel()
    return math.sqrt(total / count) if count else 0.0
