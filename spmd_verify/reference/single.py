"""Run a case on one device: the reference, its float64 twin, and every perturbed run.

All tensors are global. What a case offers is used here, in `stepped` and in `members` only:
`build_model`, `optimizer`, `batch`, `split`, `batch_dims`, `step`, `loss`, `factory_mode`,
`seed_step`, `dtype`, `steps`, `hooks.step` (see `case.LoadedCase`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spmd_verify import refusals
from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.model_build import cast_module
from spmd_verify.reference.float64_mode import CaseDtypeDraws
from spmd_verify.reference.stepped import (
    Modes,
    SteppedModel,
    eval_outputs,
    evaluates_after,
    evaluates_between,
)
from spmd_verify.reference.trajectory import StepRecord, Trajectory, first_difference
from spmd_verify.user_code import one_line


@dataclass(frozen=True)
class Reference:
    """What one device computes.

    Attributes:
        run: The free run in the case's dtype.
        exact: The free run in float64; equals `run` for a float64 case; None if absent.
        anchored: The float64 run that starts every step from `run`'s state; None if absent.
        absent: Why the float64 runs are absent, with operator and line; None if they are not.
        islands: Places that computed below float64 inside the float64 run.
    """

    run: Trajectory
    exact: Trajectory | None
    anchored: Trajectory | None
    absent: str | None = None
    islands: tuple[str, ...] = ()


@dataclass
class SingleDevice:
    """Runs of one case on one device; builds each model anew from the same state.

    Attributes:
        case: The case.
        draws: False once the reference is known to draw no random numbers in its steps.
        can_branch: Whether steps are known to use nothing of earlier ones that is not restored.
        twin: The case in float64.
    """

    case: LoadedCase
    draws: bool = field(default=True, init=False)
    can_branch: bool = field(default=False, init=False)
    _pristine: nn.Module | None = field(default=None, init=False)
    _can_copy: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        """Derive the case that runs in float64."""
        # Cached by the case; read now so that no dtype mode is active when it is made.
        self.case.leaf_paths, self.case.batch_dims  # noqa: B018
        self.twin = copy.copy(self.case)
        self.twin.dtype = torch.float64

    def build(self, *, in_float64: bool = False) -> tuple[nn.Module, Any]:
        """Return a fresh model and its optimizer.

        The model is a copy of one that was built from the seed, or is built again where
        copying is not possible or not safe.
        """
        model = self._copied() or self.case.build_model()
        if in_float64:
            cast_module(model, torch.float64)
        return model, self.case.optimizer(model)

    def _copied(self) -> nn.Module | None:
        """Return a deep copy of the pristine model; None where models are built each time."""
        if not self._can_copy:
            return None
        if self._pristine is None:
            self._pristine = self.case.build_model()
        try:
            return copy.deepcopy(self._pristine)
        except (RuntimeError, TypeError, AttributeError, NotImplementedError, copy.Error):
            self._can_copy = False  # such as weight_norm's non-leaf weights
            return None

    def run(
        self,
        *,
        anchors: Trajectory | None = None,
        steps: int | None = None,
        is_over: Callable[[int, StepRecord], bool] | None = None,
        evaluation: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> Trajectory:
        """Run the case's steps.

        Args:
            anchors: A free run; every step n >= 1 starts from its state after step n - 1.
            steps: Fewer steps than the case's.
            is_over: Given every step, says whether the rest need not be run.
            evaluation: Gives the context of an eval forward.
            options: `in_float64`, and of `SteppedModel`.
        """
        run = self._started(**options)
        for index in range(steps or self.case.steps):
            if anchors is not None and index > 0:
                run.restore(anchors, index)
            record = run.step(index)
            if is_over is not None and is_over(index, record):
                break
            if evaluates_after(run.case, index):
                with evaluation():
                    self._evaluate_between(run, is_free=anchors is None)
        if anchors is None and steps is None:
            with evaluation():
                run.evaluate()
        return run.trajectory

    def _evaluate_between(self, run: SteppedModel, *, is_free: bool) -> None:
        """Run the eval forward that comes between two steps, and keep it where it is compared."""
        if not run.case.variants.train_eval_train:
            if is_free:
                eval_outputs(run.case, run.model)
        elif is_free:
            run.evaluate()
        else:
            eval_outputs(run.case, run.model)

    def run_both(self, anchors: Trajectory, **options: Any) -> tuple[Trajectory, Trajectory]:
        """Run the case's steps free and anchored: `run` without and with `anchors`.

        Where nothing but what is restored carries over from step to step, the anchored steps
        follow in the same model, and step 0, which both have, is run once.
        """
        if not self.can_branch:
            return self.run(**options), self.run(anchors=anchors, **options)
        run = self._started(**options)
        for index in range(self.case.steps):
            run.step(index)
        run.evaluate()
        free = run.branch()
        for index in range(1, self.case.steps):
            run.restore(anchors, index)
            run.step(index)
        return free, run.trajectory

    def repeats(self, known: Trajectory) -> bool:
        """Run every step once more, out of order, each from its own state.

        Returns:
            Whether everything is that of `known` bit for bit. If so, the case is
            deterministic, and its steps use nothing of earlier ones that is not restored: no
            counter, no average in a closure, no gradient left over.
        """
        run, last = self._started(), self.case.steps - 1
        # Of two steps the second is run twice, so that one of them is out of its place.
        order = [0, *range(last, 0, -1), *([1] if last == 1 else [])]
        try:
            for index in order:
                if index > 0:
                    run.restore(known, index)
                run.step(index)
            run.restore(known, last + 1)
        except Exception:  # noqa: BLE001 - user code in an order its author never tried
            return False
        run.evaluate()
        again = run.trajectory.steps
        outputs = {"eval_outputs": again[-1].pop("eval_outputs")}
        expected = [
            {stage: seen for stage, seen in known.steps[index].items() if stage != "eval_outputs"}
            for index in order
        ]
        expected.append({"eval_outputs": known.steps[last]["eval_outputs"]})
        return first_difference(expected, [*again, outputs]) is None

    def _started(
        self, *, in_float64: bool = False, modes: Modes | None = None, **options: Any
    ) -> SteppedModel:
        """Return a freshly built model to step."""
        case = self.twin if in_float64 else self.case
        model, optimizer = self.build(in_float64=in_float64)
        if in_float64 and self.draws and self.case.dtype != torch.float64 and not modes:
            modes = self._draw_as_case
        return SteppedModel(case, model, optimizer, modes=modes, **options)

    def _draw_as_case(self, _index: int) -> AbstractContextManager[Any]:
        """Return the context in which a float64 step draws the case's random numbers."""
        return CaseDtypeDraws(self.case.dtype)


def make_reference(case: LoadedCase) -> tuple[SingleDevice, Reference]:
    """Run a case on one device: twice in its dtype, and in float64.

    Raises:
        ReferenceRunError: `not-deterministic`, `reference-not-finite`.
    """
    device = SingleDevice(case)
    run = device.run()
    _check_deterministic(device, run)
    _check_finite(case, run)
    device.draws = _draws(case, run)
    if case.dtype == torch.float64:
        return device, Reference(run, run, run)
    exact, anchored, absent, islands = _in_float64(device, run)
    return device, Reference(run, exact, anchored, absent, islands)


def _check_deterministic(device: SingleDevice, run: Trajectory) -> None:
    """Run once more; a model that differs only when copied is built each time from now on."""
    if not evaluates_between(device.case):
        device.can_branch = device.repeats(run)
        if device.can_branch:
            return
    difference = first_difference(run.steps, device.run().steps)
    if difference is not None and device._can_copy:
        device._can_copy = False
        difference = first_difference(device.run().steps, device.run().steps)
    if difference is not None:
        step, stage, name = difference
        raise refusals.not_deterministic(device.case.address, stage, name, step)


def _draws(case: LoadedCase, run: Trajectory) -> bool:
    """Say whether any step of a run drew from torch's generator."""
    for step, after in enumerate(run.random_states):
        case.seed_step(step)
        if not torch.equal(torch.get_rng_state(), after):
            return True
    return False


def _check_finite(case: LoadedCase, run: Trajectory) -> None:
    """Refuse a reference whose loss or gradients are NaN or inf."""
    for index, record in enumerate(run.steps):
        for stage in ("loss", "gradients"):
            for name, value in record[stage].items():
                if not bool(value.isfinite().all()):
                    bad = "nan" if bool(value.isnan().any()) else "inf"
                    raise refusals.not_finite(case.address, name, bad, index)


def _in_float64(
    device: SingleDevice, run: Trajectory
) -> tuple[Trajectory | None, Trajectory | None, str | None, tuple[str, ...]]:
    """Return the float64 runs, free and anchored, or why there are none, and the islands met.

    The proof that they drew the same numbers is the generator state after every step.
    """
    islands: dict[str, None] = {}

    def modes(_index: int) -> AbstractContextManager[Any]:
        mode = CaseDtypeDraws(device.case.dtype)
        mode.islands = islands
        return mode

    try:
        exact, anchored = device.run_both(run, in_float64=True, modes=modes)
    except Exception as error:  # noqa: BLE001 - user code in a dtype its author never tried
        return None, None, f"the float64 run raised {one_line(error)}", ()
    for step, expected in enumerate(run.random_states):
        states = exact.random_states[step], anchored.random_states[step]
        if not all(torch.equal(state, expected) for state in states):
            return None, None, f"step {step}: {_first_other_draw(device, step)}", ()
    return exact, anchored, None, tuple(islands)


def _first_other_draw(device: SingleDevice, step: int) -> str:
    """Name the first operator after which the generator states of two precisions differ."""
    found: list[list[tuple[str, str, Tensor]]] = []
    for in_float64 in (False, True):
        tracers: list[CaseDtypeDraws] = []

        def modes(
            _index: int, cast: bool = in_float64, kept: list[CaseDtypeDraws] = tracers
        ) -> AbstractContextManager[Any]:
            kept.append(CaseDtypeDraws(device.case.dtype, trace=True, cast=cast))
            return kept[-1]

        device.run(in_float64=in_float64, modes=modes, steps=step + 1, with_module_outputs=False)
        found.append(tracers[step].draws)
    for (name, place, left), (_, _, right) in zip(*found, strict=False):
        if not torch.equal(left, right):
            return f"{name} at {place} leaves another generator state in float64"
    return f"float64 draws {len(found[1])} times, the case's dtype {len(found[0])} times"
