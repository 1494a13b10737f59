"""One model of a case on one device, stepped: as the reference, or perturbed by a member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify.cases.batches import TARGETS, cast_floating
from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import evaluation, evaluation_mode, forward
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import (
    StepRecord,
    Trajectory,
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

Modes = Callable[[int], AbstractContextManager[Any]]


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

    def prepare(self, optimizer: Any) -> None:
        """Change the optimizer before the first step."""
        ...

    def before(self, model: nn.Module, step: int) -> None:
        """Look at the model before its step."""
        ...

    def after(self, model: nn.Module, step: int) -> None:
        """Change the model after its step."""
        ...


@dataclass
class SteppedModel:
    """A model with its optimizer, and what its steps have shown so far.

    Attributes:
        case: In the dtype of the model.
        model: Freshly built.
        optimizer: Its optimizer, or several.
        member: How its steps are perturbed.
        modes: Context for each step, by its index.
        with_module_outputs: Whether to hook every module.
        is_brief: See `observed_step`.
        trajectory: What was seen.
    """

    case: LoadedCase
    model: nn.Module
    optimizer: Any
    member: Member | None = None
    modes: Modes | None = None
    with_module_outputs: bool = True
    is_brief: bool = False
    trajectory: Trajectory = field(init=False)
    _initial: StepRecord = field(init=False)

    def __post_init__(self) -> None:
        """Note names and the initial state."""
        names = {id(tensor): name for name, tensor in named_parameters(self.model)[0].items()}
        self.trajectory = Trajectory(aliases=aliases_of(self.model))
        self.trajectory.groups = parameter_groups(names, self.optimizer)
        self._initial = model_snapshot(self.model)
        if self.member is not None:
            self.member.prepare(self.optimizer)

    def step(self, index: int) -> StepRecord:
        """Run one step and return what was seen; it is the trajectory's next one."""
        case, member = self.case, self.member
        self.trajectory.hyper_parameters.append(hyper_parameters(self.optimizer))
        batch = cast_floating(case.batch(index), case.dtype)
        if member is not None:
            batch = member.batch(batch, index)
            member.before(self.model, index)
        case.seed_step(index)
        with ExitStack() as stack:
            stack.enter_context(self.modes(index) if self.modes else nullcontext())
            stack.enter_context(member.around(index) if member else nullcontext())
            own = member.step(case, index) if member else None
            step = own or observed_step(case, self.with_module_outputs, is_brief=self.is_brief)
            record = step(self.model, self.optimizer, batch)
        self.trajectory.random_states.append(torch.get_rng_state())
        if member is not None:
            member.after(self.model, index)
        record = {**record, **snapshot(self.model, self.optimizer)}
        if not self.trajectory.steps:
            record["initial_state"] = {**self._initial["parameters"], **self._initial["buffers"]}
        self.trajectory.steps.append(record)
        return record

    def restore(self, run: Trajectory, index: int) -> None:
        """Put the state before step `index` of a run back, in place."""
        restore(self.model, self.optimizer, run.steps[index - 1])
        if index < len(run.hyper_parameters):
            restore_hyper_parameters(self.optimizer, run.hyper_parameters[index])

    def branch(self) -> Trajectory:
        """Return the trajectory so far; another one with the same step 0 begins here."""
        found = self.trajectory
        first = {stage: seen for stage, seen in found.steps[0].items() if stage != "eval_outputs"}
        self.trajectory = Trajectory(
            steps=[first],
            aliases=found.aliases,
            hyper_parameters=found.hyper_parameters[:1],
            groups=found.groups,
            random_states=found.random_states[:1],
        )
        return found

    def evaluate(self) -> None:
        """Add `eval_outputs` of step 0's inputs to the last step."""
        try:
            outputs = eval_outputs(self.case, self.model)
        except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
            self.trajectory.notes.append(f"the eval forward raised {one_line(error)}")
            outputs = {}
        self.trajectory.steps[-1]["eval_outputs"] = outputs


def observed_step(
    case: LoadedCase, with_module_outputs: bool = True, *, is_brief: bool = False
) -> Callable[[nn.Module, Any, Any], StepRecord]:
    """Return the case's step as the reference runs it: observed, gradients in backward order.

    Args:
        case: The case.
        with_module_outputs: Whether to hook every module.
        is_brief: Leave out what noise runs say nothing about: inputs and the order of gradients.
    """

    def step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
        observer = Observer(
            model,
            optimizer,
            order_gradients=not is_brief,
            with_module_outputs=with_module_outputs,
        )
        observer.with_inputs = not is_brief
        with observer:
            for name, tensor in () if is_brief else labels(case, batch):
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
    with evaluation_mode(case, model), evaluation(case, model):
        output = forward(case, model, args, kwargs)
    return {path: tensor.detach().clone() for path, tensor in flatten(output, "model")}


def evaluates_after(case: LoadedCase, step: int) -> bool:
    """Say whether an eval forward follows a step of free runs: the override `between=eval`.

    Under the variant `train_eval_train` one follows the steps of anchored runs too, and those of
    free runs are compared.
    """
    return evaluates_between(case) and step < case.steps - 1


def evaluates_between(case: LoadedCase) -> bool:
    """Say whether eval forwards come between the steps of a case."""
    return case.overrides.get("between") == "eval" or case.variants.train_eval_train


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied parameters and shared buffers, by first name."""
    return {**named_parameters(model)[1], **named_buffers(model)[1]}
