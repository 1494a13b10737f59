"""Measure the noise of a case: legality-checked runs and the floors that follow from them.

Normative: verdicts.md part 3. A reordering counts only where the same reordering in float64
leaves the result alone; what does not is dropped and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.noise.floor_table import COPIED_STAGES, FloorTable, Scales, follow_updates
from spmd_verify.noise.floors import Ensemble, Floor, Key, rms
from spmd_verify.noise.members import (
    Flipped,
    Permuted,
    Plain,
    Rounded,
    Split,
    contribution,
    part_sizes,
    weighted_sum,
)
from spmd_verify.norms import as_real, deviation
from spmd_verify.reference.single import Reference, SingleDevice
from spmd_verify.reference.trajectory import StepRecord, Trajectory
from spmd_verify.user_code import one_line
from spmd_verify.verdict import ANCHORED_STAGES, CARRIED_STAGES, STAGES, unit_roundoff

# At least so many noise runs, at least so many of them with random rounding: only those say
# anything about module outputs, whose rows a reordering moves. Source: verdicts.md part 3 (4).
FEWEST_RUNS: Final = 4
FEWEST_ROUNDED: Final = 2
# What a legal reordering may change in float64, relative to S; behind a float32 island the
# second. Source: verdicts.md part 3.
LEGAL: Final = 1e-9
LEGAL_BEHIND_ISLAND: Final = 1e-5
# Stages whose rows keep their place when the batch is reordered.
REORDERED_STAGES: Final = (
    "loss",
    "gradients",
    "clipping",
    "optimizer_state",
    "parameters",
    "buffers",
    "eval_outputs",
)
MEASURED_STAGES: Final = tuple(stage for stage in STAGES if stage not in COPIED_STAGES)
BY_ELEMENT: Final = ("gradients", "optimizer_state", "parameters")
# Enough to find the place; the rest follows from the first.
SHOWN_ISLANDS: Final = 4


@dataclass(frozen=True)
class Noise:
    """What the noise runs found.

    Attributes:
        floors: By run (`free`, `anchored`) and (step, stage, name).
        runs: Names of the runs that counted.
        dropped: Runs that did not count, each with its reason.
        islands: Places that compute in a coarser dtype than the case's.
        undetermined: Parameter elements whose update only rounding decides.
    """

    floors: Mapping[str, Mapping[Key, Floor]]
    runs: tuple[str, ...]
    dropped: tuple[str, ...]
    islands: tuple[str, ...]
    undetermined: int


@dataclass
class SplitProbe(Plain):
    """Runs a split in float64, finds the weights of its parts and S."""

    split: Split
    reference: Trajectory
    scales: Scales = field(default_factory=list)

    def step(self, case: LoadedCase, index: int) -> Callable[..., StepRecord]:
        """Return a step that fits the parts to the float64 reference."""

        def step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
            losses, gradients = self.split.run_parts(case, model, optimizer, batch)
            sizes = part_sizes(case.batch_size_of(batch), self.split.parts)
            expected = self.reference.steps[index]
            weights = self.split.fit(sizes, gradients, expected)
            if weights is None:
                raise NotSeparable("no weights of the parts give the whole batch's gradients")
            self.split.weights[index] = weights
            names = [name for name in expected["gradients"] if all(name in g for g in gradients)]
            scale = {n: contribution(weights, [g[n] for g in gradients]) for n in names}
            self.scales.append(
                {"gradients": scale, "loss": {"loss": contribution(weights, losses)}}
            )
            combined = {n: weighted_sum([g[n] for g in gradients], weights) for n in names}
            loss = weighted_sum(losses, weights)
            return {"loss": {"loss": loss}, "gradients": combined}

        return step


class NotSeparable(Exception):
    """The parts of a batch do not add up to the whole."""


@dataclass
class _Ensembles:
    """The two ensembles of a case, and how a member gets into them."""

    device: SingleDevice
    reference: Reference
    free: Ensemble
    anchored: Ensemble

    def add(self, member: Plain) -> None:
        """Run one member free and anchored and take it into both ensembles."""
        self._add(member, MEASURED_STAGES, frozenset())

    def add_reordered(self, member: Plain, buffers: frozenset[str]) -> None:
        """Take in a member that reorders the batch and changes some buffers."""
        # What these buffers feed in evaluation is not comparable either.
        left_out = {"eval_outputs"} if buffers else set()
        stages = tuple(stage for stage in REORDERED_STAGES if stage not in left_out)
        self._add(member, stages, buffers)

    def _add(self, member: Plain, stages: Sequence[str], left_out: frozenset[str]) -> None:
        """Run one member and take the given stages of it."""
        watch = "module_outputs" in stages
        options: dict[str, Any] = {"member": member, "with_module_outputs": watch, "is_brief": True}
        if self.device.case.steps > 1:
            run, anchored = self.device.run_both(self.reference.run, **options)
            # Step 0 is the free run's.
            wanted = [stage for stage in stages if stage in ANCHORED_STAGES | CARRIED_STAGES]
            self.anchored.add(
                anchored.steps, stages=wanted, by_element=BY_ELEMENT, left_out=left_out, first=1
            )
        else:
            run = self.device.run(**options)
        self.free.add(run.steps, stages=stages, by_element=BY_ELEMENT, left_out=left_out)


def measure(device: SingleDevice, reference: Reference) -> Noise:
    """Run the noise runs of a case and return its floors."""
    case, u = device.case, unit_roundoff(str(device.case.dtype).removeprefix("torch."))
    exact = (reference.exact or reference.run).steps
    free = Ensemble(exact, reference.run.steps)
    anchored = Ensemble((reference.anchored or reference.run).steps, reference.run.steps)
    for ensemble in (free, anchored):
        ensemble.add(reference.run.steps, stages=MEASURED_STAGES, by_element=BY_ELEMENT)
    ensembles = _Ensembles(device, reference, free, anchored)
    islands: dict[str, None] = {}
    rounded = [_rounded(case, i, islands) for i in range(FEWEST_ROUNDED)]
    for member in rounded:
        ensembles.add(member)
    legal, dropped, scales = _reorderings(device, reference, bool(islands or reference.islands))
    for reordered, buffers in legal:
        ensembles.add_reordered(reordered, buffers)
    while len(legal) + len(rounded) < FEWEST_RUNS:
        rounded.append(_rounded(case, len(rounded), islands))
        ensembles.add(rounded[-1])
    anchored.take_step(free, 0, ANCHORED_STAGES | CARRIED_STAGES)
    runs = [member.name for member, _ in legal] + [member.name for member in rounded]
    flips = follow_updates(free, scales, u).flips
    if any(flips):
        # One direction may cancel downstream: a normalisation over two samples was moved
        # four times as far by another choice of signs.
        for name, share in (("all", 0), ("half", 1), ("other half", -1)):
            flipped = Flipped(f"flipped updates: {name}", flips, share)
            run = device.run(member=flipped, is_brief=True)
            free.add(run.steps, stages=MEASURED_STAGES, by_element=BY_ELEMENT)
            runs.append(flipped.name)
    place = f"computed in a coarser dtype: {next(iter(islands))}" if islands else ""
    table = FloorTable(free, scales, place, u, is_free=True)
    found = table.build()

    def is_anchored(step: int, stage: str, name: str) -> bool:
        """Say whether the anchored run decides: step 0 is the free run's."""
        count = exact[step][stage][name].numel()
        return step > 0 and (
            stage in ANCHORED_STAGES or not found[step, stage, name].decides(count)
        )

    anchored_table = FloorTable(anchored, scales, place, u, is_free=False, is_wanted=is_anchored)
    floors = {"free": found, "anchored": anchored_table.build()}
    count = sum(int(mask.sum()) for mask in table.undetermined.values())
    return Noise(floors, tuple(runs), tuple(dropped), tuple(islands)[:SHOWN_ISLANDS], count)


def _rounded(case: LoadedCase, index: int, islands: dict[str, None]) -> Rounded:
    """Return the random-rounding run of an index."""
    return Rounded(f"random rounding {index}", index + 1, case.dtype, islands)


def _reorderings(
    device: SingleDevice, reference: Reference, has_islands: bool
) -> tuple[list[tuple[Plain, frozenset[str]]], list[str], Scales]:
    """Return the legal reorderings with the buffers they change, the dropped ones, and S.

    S comes from the finest legal split; where none is legal it is empty.
    """
    case = device.case
    size = case.batch_size
    if reference.anchored is None or size < 2 or all(dim is None for dim in case.batch_dims):
        return [], [], []
    proposed: list[Plain] = [Permuted("batch permutation", case, 11)]
    if case.hooks.step is None:
        proposed += [
            Split(f"split in {parts} parts", parts, is_reversed)
            for parts, is_reversed in ((2, False), (min(4, size), True))
        ]
    tolerance = LEGAL_BEHIND_ISLAND if has_islands else LEGAL
    legal: list[tuple[Plain, frozenset[str]]] = []
    dropped: list[str] = []
    scales: Scales = []
    for member in proposed:
        probe = (
            SplitProbe(member.name, member, reference.anchored)
            if isinstance(member, Split)
            else member
        )
        check = _Legality(reference.anchored, tolerance, probe)
        try:
            device.run(
                in_float64=True,
                member=probe,
                anchors=reference.run,
                with_module_outputs=False,
                is_brief=True,
                is_over=check,
            )
        except Exception as error:  # noqa: BLE001 - user code on a batch nobody tried
            dropped.append(
                f"{member.name}: {error if isinstance(error, NotSeparable) else one_line(error)}"
            )
            continue
        if check.why:
            dropped.append(f"{member.name} changes the result: {check.why}")
            continue
        legal.append((member, frozenset(check.buffers)))
        scales = check.scales or scales
    return legal, dropped, scales


@dataclass
class _Legality:
    """Compares the steps of a float64 reordering with the float64 reference.

    Attributes:
        why: What differs in loss or gradients, the first such; None if nothing does.
        buffers: The buffers that differ, which alone do not make a run illegal.
    """

    reference: Trajectory
    tolerance: float
    probe: Plain
    why: str | None = None
    buffers: set[str] = field(default_factory=set)

    @property
    def scales(self) -> Scales:
        """S of the steps so far, where the parts of the batch exist."""
        return self.probe.scales if isinstance(self.probe, SplitProbe) else []

    def __call__(self, step: int, record: StepRecord) -> bool:
        """Compare one step; say whether the run is illegal."""
        expected = self.reference.steps[step]
        typical = rms(expected["gradients"].values())
        parts = self.scales[step] if self.scales else {}
        for stage in ("loss", "gradients", "buffers"):
            for name, centre in expected[stage].items():
                value = record.get(stage, {}).get(name)
                if value is None or value.shape != centre.shape:
                    self.why = f"{stage} {name} is absent in step {step}"
                    return True
                scale = parts.get(stage, {}).get(name, centre)
                # Gradients that cancel to zero have no scale of their own.
                small = 1e-3 * typical * centre.numel() ** 0.5 if stage == "gradients" else 0.0
                error = float(deviation(value, centre).norm())
                # S costs as much again: asked only where the smallest it can be is not enough.
                if error <= self.tolerance * small:
                    continue
                whole = float(as_real(scale).to(torch.float64).norm())
                if error <= self.tolerance * max(whole, small):
                    continue
                if stage != "buffers":
                    self.why = f"{stage} {name} differs by {error:.1e} in step {step}"
                    return True
                self.buffers.add(name)
        return False


def exact_steps(reference: Reference, run: str) -> Sequence[StepRecord] | None:
    """Return the float64 steps of a run, None where they are absent."""
    chosen = reference.exact if run == "free" else reference.anchored
    return chosen.steps if chosen is not None else None
