"""Run a case on one device: the reference, its float64 twin, and every perturbed run.

All tensors are global. What a case offers is used here and in `members` only: `build_model`,
`optimizer`, `batch`, `split`, `batch_dims`, `step`, `loss`, `factory_mode`, `seed_step`,
`dtype`, `steps`, `hooks.step` (see `case.LoadedCase`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify import refusals
from spmd_verify.batches import TARGETS, cast_floating
from spmd_verify.case import LoadedCase
from spmd_verify.float64_mode import CaseDtypeDraws
from spmd_verify.model_build import cast_module, evaluating
from spmd_verify.observe import Observer
from spmd_verify.trajectory import (
    StepRecord,
    Trajectory,
    first_difference,
    flatten,
    hyper_parameters,
    model_snapshot,
    named_buffers,
    named_parameters,
    parameter_groups,
    restore,
    restore_hyper_parameters,
    snapshot,
)
from spmd_verify.user_code import one_line


class Member(Protocol):
    """One member of the ensemble: how its run differs from the reference's."""

    name: str

    def batch(self, batch: Any, step: int) -> Any:
        """Return the batch this member feeds, from the global one."""
        ...

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Return the context its step runs in."""
        ...

    def step(self, case: LoadedCase, index: int) -> Callable[..., StepRecord] | None:
        """Return `(model, optimizer, batch) -> record` instead of the case's step, or None."""
        ...

    def before(self, model: nn.Module, step: int) -> None:
        """Look at the model before its step."""
        ...

    def after(self, model: nn.Module, step: int) -> None:
        """Change the model after its step."""
        ...


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
        twin: The case in float64.
        evaluation: Gives the context of an eval forward.
    """

    case: LoadedCase
    draws: bool = field(default=True, init=False)
    evaluation: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, init=False)
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
        in_float64: bool = False,
        member: Member | None = None,
        anchors: Trajectory | None = None,
        modes: Callable[[int], AbstractContextManager[Any]] | None = None,
        with_module_outputs: bool = True,
        steps: int | None = None,
    ) -> Trajectory:
        """Run the case's steps.

        Args:
            in_float64: Cast model and batches, draw in the case's dtype.
            member: How this run is perturbed.
            anchors: A free run; every step n >= 1 starts from its state after step n - 1.
            modes: Context for each step, by its index.
            with_module_outputs: Whether to hook every module.
            steps: Fewer steps than the case's.
        """
        case = self.twin if in_float64 else self.case
        model, optimizer = self.build(in_float64=in_float64)
        trajectory = Trajectory(aliases=aliases_of(model))
        names = {id(tensor): name for name, tensor in named_parameters(model)[0].items()}
        trajectory.groups = parameter_groups(names, optimizer)
        initial = model_snapshot(model)
        for index in range(steps or case.steps):
            if anchors is not None and index > 0:
                restore(model, optimizer, anchors.steps[index - 1])
                restore_hyper_parameters(optimizer, anchors.hyper_parameters[index])
            trajectory.hyper_parameters.append(hyper_parameters(optimizer))
            batch = cast_floating(case.batch(index), case.dtype)
            if member is not None:
                batch = member.batch(batch, index)
                member.before(model, index)
            case.seed_step(index)
            with ExitStack() as stack:
                if in_float64 and self.draws and self.case.dtype != torch.float64 and not modes:
                    stack.enter_context(CaseDtypeDraws(self.case.dtype))
                stack.enter_context(modes(index) if modes else nullcontext())
                stack.enter_context(member.around(index) if member else nullcontext())
                own = member.step(case, index) if member else None
                step = own or observed_step(case, with_module_outputs)
                record = step(model, optimizer, batch)
            trajectory.random_states.append(torch.get_rng_state())
            if member is not None:
                member.after(model, index)
            trajectory.steps.append({**record, **snapshot(model, optimizer)})
            if evaluates_after(case, index) and anchors is None:
                with self.evaluation():
                    eval_outputs(case, model)
        trajectory.steps[0]["initial_state"] = {**initial["parameters"], **initial["buffers"]}
        if anchors is None and steps is None:
            self._evaluate(case, model, trajectory)
        return trajectory

    def _evaluate(self, case: LoadedCase, model: nn.Module, trajectory: Trajectory) -> None:
        """Add `eval_outputs` of step 0's inputs to the last step."""
        try:
            with self.evaluation():
                outputs = eval_outputs(case, model)
        except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
            trajectory.notes.append(f"the eval forward raised {one_line(error)}")
            outputs = {}
        trajectory.steps[-1]["eval_outputs"] = outputs


def observed_step(
    case: LoadedCase, with_module_outputs: bool = True
) -> Callable[[nn.Module, Any, Any], StepRecord]:
    """Return the case's step as the reference runs it: observed, gradients in backward order."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
        with Observer(
            model, optimizer, order_gradients=True, with_module_outputs=with_module_outputs
        ) as observer:
            for name, tensor in labels(case, batch):
                observer.add("inputs", name, tensor)
            loss = case.step(model, optimizer, batch)
        observer.add_loss(loss)
        return observer.record

    return step


def labels(case: LoadedCase, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Give the targets of a batch by path: what forward is not given."""
    for path, leaf in zip(case.leaf_paths, pytree.tree_leaves(batch), strict=True):
        if isinstance(leaf, Tensor) and (path == TARGETS or path.startswith(f"{TARGETS}.")):
            yield path, leaf


def eval_outputs(case: LoadedCase, model: nn.Module) -> dict[str, Tensor]:
    """Run one eval forward on step 0's inputs; the model is in the mode it was in afterwards.

    The seed is the one of the step after the last.
    """
    args, kwargs, _ = case.split(cast_floating(case.batch(0), case.dtype))
    case.seed_step(case.steps)
    with evaluating(model), torch.no_grad(), case.factory_mode():
        output = model(*args, **kwargs)
    return {path: tensor.detach().clone() for path, tensor in flatten(output, "model")}


def evaluates_after(case: LoadedCase, step: int) -> bool:
    """Say whether an eval forward follows a step of free runs: the override `between=eval`."""
    return case.overrides.get("between") == "eval" and step < case.steps - 1


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied parameters and shared buffers, by first name."""
    return {**named_parameters(model)[1], **named_buffers(model)[1]}


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
    exact, absent, islands = _in_float64(device, run)
    if exact is None:
        return device, Reference(run, None, None, absent)
    anchored, absent, _ = _in_float64(device, run, anchors=run)
    if anchored is None:
        return device, Reference(run, None, None, absent)
    return device, Reference(run, exact, anchored, None, islands)


def _check_deterministic(device: SingleDevice, run: Trajectory) -> None:
    """Run once more; a model that differs only when copied is built each time from now on."""
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
    device: SingleDevice, run: Trajectory, anchors: Trajectory | None = None
) -> tuple[Trajectory | None, str | None, tuple[str, ...]]:
    """Return a float64 run, or why there is none, and the islands met.

    The proof that it drew the same numbers is the generator state after every step.
    """
    islands: dict[str, None] = {}

    def modes(_index: int) -> AbstractContextManager[Any]:
        mode = CaseDtypeDraws(device.case.dtype)
        mode.islands = islands
        return mode

    try:
        exact = device.run(in_float64=True, anchors=anchors, modes=modes)
    except Exception as error:  # noqa: BLE001 - user code in a dtype its author never tried
        return None, f"the float64 run raised {one_line(error)}", ()
    for step, (left, right) in enumerate(zip(exact.random_states, run.random_states, strict=True)):
        if not torch.equal(left, right):
            return None, f"step {step}: {_first_other_draw(device, step)}", ()
    return exact, None, tuple(islands)


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
