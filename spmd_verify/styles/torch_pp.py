"""The styles `pp` and `ddp+pp`: torch.distributed.pipelining over one axis.

Every rank trains one stage. A schedule runs the micro-batches of the rank's part of the batch,
the last stage has the loss, gradients are the mean over micro-batches. Under `ddp+pp` every stage
is wrapped in DistributedDataParallel over the data axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from spmd_verify.blocks import blocks_of
from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import update
from spmd_verify.errors import Unsupported
from spmd_verify.exact.case import ExactCase
from spmd_verify.micro_batches import micro_batch_count, micro_batches
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import optimizers_of
from spmd_verify.seeding import RandomState
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.styles.base import Observed, StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.pipeline_cuts import stage_links
from spmd_verify.styles.pipeline_stages import SplitModel, Stage, examples, run_through, split_model
from spmd_verify.styles.pipeline_step import OwnStep, StepForm, global_norm, shared, step_form
from spmd_verify.styles.rank_batches import part_of
from spmd_verify.styles.torch_base import TorchRecipe, check_axes
from spmd_verify.styles.torch_refusals import torch_refuses

AXIS: Final = "pp"
_SCHEDULES: Final = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class Plan:
    """How one case is run in stages.

    Attributes:
        links: The modules of every stage.
        count: Micro-batches of a rank's part of the batch.
        given: `(args, kwargs)` of the first micro-batch of step 0, which the model is exported
            with.
        first: That micro-batch.
        output: The structure of the model's output.
        schedule: `gpipe` or `1f1b`.
        form: What the case's own step does; None where it has none.
    """

    links: list[list[str]]
    count: int
    given: tuple[Any, Any]
    first: Any
    output: pytree.TreeSpec
    schedule: str
    form: StepForm | None = None


@dataclass(frozen=True)
class PipelineRecipe(TorchRecipe):
    """Split the model, keep this rank's stage.

    Attributes:
        has_data_axis: Whether stages are wrapped in DistributedDataParallel.
        plan: Where the model is split; made for each case.
        splits: Where the split model is left for the run, one entry a build.
    """

    name: str = AXIS
    has_data_axis: bool = False
    plan: Plan | None = None
    splits: list[SplitModel] = field(default_factory=list)

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return this rank's stage and an optimizer of its parameters."""
        assert self.plan is not None, "PipelineStyle.build makes it"
        optimizer = case.optimizer(model)
        # Without exact mode's surrogates, which act on the exported operators when they run.
        with LoadedCase.factory_mode(case):
            split = split_model(self.name, model, self.plan.links, *self.plan.given)
        self.splits.append(split)
        stage = split.stages[mesh.get_local_rank(AXIS)]
        narrow(optimizer, stage)
        if not self.has_data_axis:
            return stage, optimizer
        data = next(name for name in mesh.mesh_dim_names if name in DATA_AXES)
        has_unused = any(p.requires_grad for p in _unused(split, stage))
        wrapped = DistributedDataParallel(
            stage, process_group=mesh.get_group(data), find_unused_parameters=has_unused
        )
        return wrapped, optimizer


def _unused(split: SplitModel, stage: Stage) -> list[nn.Parameter]:
    """Return the parameters that a stage has and no stage uses."""
    own = dict(stage.module.named_parameters())
    return [own[name] for name in split.left if name in own]


def narrow(optimizer: Any, stage: nn.Module) -> None:
    """Leave an optimizer of the whole model the parameters of a stage, in the same groups."""
    own = {id(p) for p in stage.parameters()}
    for single in optimizers_of(optimizer):
        for group in single.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        for parameter in [p for p in single.state if id(p) not in own]:
            del single.state[parameter]


class PipelineRun(EagerRun):
    """One stage of a model, stepped by a schedule."""

    def __init__(self, recipe: PipelineRecipe, case: LoadedCase, context: StyleContext) -> None:
        """Split the model and set up the schedule of this rank's stage."""
        assert recipe.plan is not None, "PipelineStyle.build makes it"
        self.plan = recipe.plan
        super().__init__(recipe, case, context)
        self.split = recipe.splits[-1]
        at = self.mesh.get_local_rank(AXIS)
        self.stage = self.split.stages[at]
        self.own = OwnStep(case, self.stage.module, self.optimizer)
        self._parts: list[Any] = []
        self._last: tuple[Tensor, ...] = ()
        with (
            torch_refuses(recipe.name, "running the stages one after the other"),
            case.factory_mode(),
        ):
            self._feed([self.plan.first])
            sent = examples(self.split)
        self._given = sent[-1]
        staged = PipelineStage(
            self.model,
            at,
            len(sent),
            context.device,
            input_args=sent[at - 1] if at else (),
            output_args=sent[at],
            group=self.mesh.get_group(AXIS),
        )
        with torch_refuses(recipe.name, "setting up the schedule"):
            self.schedule = _SCHEDULES[self.plan.schedule](
                staged, self.plan.count, loss_fn=self._loss
            )

    def observer(self) -> Observer:
        """Return an observer of gradients: a stage's forward sees micro-batches of parts."""
        observer = Observer(self.model, self.optimizer, names=self.names, with_module_outputs=False)
        observer.with_inputs = False
        return observer

    def train(self, part: Any) -> Tensor | None:
        """Run the schedule and step the optimizer; return the mean loss on the last stage."""
        form = self.plan.form
        for each in self.optimizers() if form is None else ():
            each.zero_grad()
        cleared = form.cleared if form is not None else frozenset()
        for name, values in self.names.parameters(self.model).items():
            if name in cleared:
                values[0].grad = None
        losses: list[Tensor] = []
        numbers = torch.arange(self.plan.count)
        # Inside the mode that `case.step` enters: it is what one device computes under.
        with torch_refuses(self.recipe.name, "the schedule"), self.case.factory_mode():
            self._feed(micro_batches(self.case, part, self.plan.count))
            if isinstance(self.case, ExactCase):
                self._see_the_loss()
            self.schedule.step(
                target=numbers, losses=losses, return_outputs=False, micro_batch=numbers
            )
        if form is None:
            # The norm that clips is that of all stages.
            with global_norm(self.mesh.get_group(AXIS)):
                update(self.case, self.model, self.optimizer)
        else:
            self._finish()
        if not losses or (form is not None and not form.returns_loss):
            return None
        return torch.stack([loss.detach() for loss in losses]).mean(0)

    def _see_the_loss(self) -> None:
        """Compute one loss on this rank.

        Exact mode brings gradients to a grid that follows from the mean in the loss; only the
        last stage's rank would know it.
        """
        state = RandomState.now()
        self._loss(run_through(self.split)[-1], torch.tensor([0]))
        self._last = ()
        state.restore()

    def _finish(self) -> None:
        """Do what the case's own step does after backward; all ranks see the last output."""
        group = self.mesh.get_group(AXIS)
        given = shared(self._last, self._given, self.context.device, group)
        with torch_refuses(self.recipe.name, "what the step does after backward"):
            output = self.split.output(given, self.plan.output)
            self.own.rest(output, self._parts[-1], group)

    def evaluate(self, batch: Any) -> Mapping[str, Observed] | None:  # noqa: ARG002 - see below
        """Return None: the graph was exported in training mode."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says of this run, and how many micro-batches it had."""
        found = dict(super().facts())
        firsts = [own[0] for own in self.plan.links]
        found["facts"] |= {"micro_batches": self.plan.count, "stages": firsts}
        return found

    def _loss(self, output: tuple[Tensor, ...], number: Tensor) -> Tensor:
        """Return the loss of one micro-batch from what the last stage gives."""
        part = self._parts[int(number)]
        _, _, targets = self.case.split(part)
        whole = self.split.output(output, self.plan.output)
        if self.plan.form is not None:
            self._last = output
            return self.own.loss(whole, part)
        return self.case.loss(whole, targets, batch_size=self.case.batch_size_of(part))

    def _feed(self, parts: list[Any]) -> None:
        """Give every stage on this rank the inputs of the micro-batches of a step.

        Raises:
            Unsupported: `torch-refuses`, where they have other sizes than those of step 0.
        """
        due = _sizes(self.plan.first)
        for part in parts:
            if _sizes(part) != due:
                raise Unsupported(
                    f"{self.recipe.name} does not take this case: torch exports the stages for "
                    f"micro-batches of one size. Got {_sizes(part)}, in step 0 {due}. Give every "
                    f"step inputs of the same sizes",
                    slug="torch-refuses",
                )
        self._parts = parts
        given = [
            self.own.inputs(part) if self.plan.form is not None else self.case.split(part)[:2]
            for part in parts
        ]
        leaves = [self.split.leaves(args, kwargs) for args, kwargs in given]
        for stage in self.split.stages:
            stage.inputs = leaves


@dataclass(frozen=True)
class PipelineStyle(EagerStyle):
    """Stages by rank along `pp`, the batch divided over a data axis where there is one."""

    recipe: PipelineRecipe = PipelineRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> PipelineRun:
        """Choose stages and micro-batches once per cell, then split.

        Raises:
            Unsupported: Another mesh, a step that no schedule can run, no chain of blocks, ties
                across stages, what torch refuses.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, int(self.recipe.has_data_axis), (AXIS,))
        if case.variants.autocast:
            raise Unsupported(
                f"{self.name} runs graphs that torch exported without autocast, and would compute "
                f"in the parameters' dtype. Leave out --autocast, or use --dtype",
                slug="no-mixed-precision",
            )
        if case.variants.accumulate > 1:
            raise Unsupported(
                f"{self.name} accumulates over the micro-batches of its schedule, and would leave "
                f"--accumulate {case.variants.accumulate} out. Leave it out yourself",
                slug="no-accumulation",
            )
        plan = context.kept("plan", lambda: self._plan(case, context))
        recipe = replace(self.recipe, plan=plan, splits=[])
        run = PipelineRun(recipe, case, context)
        run.extra_notes.extend(_notes(plan, case, run.split))
        return run

    def _plan(self, case: LoadedCase, context: StyleContext) -> Plan:
        """Run one micro-batch of the whole model and decide how to split it."""
        stages = context.axes[AXIS]
        part = part_of(self.recipe, case, context, case.batch(0))
        count = micro_batch_count(case.batch_size_of(part), stages)
        first = micro_batches(case, part, count)[0]
        form, (args, kwargs) = self._called(case, context, first)
        found: list[pytree.TreeSpec] = []

        def run(model: nn.Module) -> None:
            with case.factory_mode():
                found.append(pytree.tree_flatten(model(*args, **kwargs))[1])

        model = case.build_model().to(context.device)
        with torch_refuses(self.name, "one micro-batch"):
            links = stage_links(self.name, model, blocks_of(case, model), run, stages)
        schedule = case.overrides.get("schedule", "gpipe")
        return Plan(links, count, (args, kwargs), first, found[0], schedule, form)

    def _called(
        self, case: LoadedCase, context: StyleContext, first: Any
    ) -> tuple[StepForm | None, tuple[Any, Any]]:
        """Return what the case's own step does, if it has one, and what it gives to forward."""
        if case.hooks.step is None:
            return None, case.split(first)[:2]
        model = case.build_model().to(context.device)
        form = step_form(self.name, case, model, first)
        return form, OwnStep(case, model, case.optimizer(model)).inputs(first)


def _notes(plan: Plan, case: LoadedCase, split: SplitModel) -> list[str]:
    """Say how the model is split and the batch is run."""
    stages = "; ".join(
        f"{at}: {own[0]}" + (f" to {own[-1]}" if len(own) > 1 else "")
        for at, own in enumerate(plan.links)
    )
    size = case.batch_size_of(plan.first)
    found = [f"{plan.schedule} over {plan.count} micro-batches of {size}; stages {stages}"]
    if split.left:
        found.append(f"no stage uses {', '.join(split.left[:3])}: stage 0 keeps it")
    return found


def _sizes(batch: Any) -> list[Any]:
    """Return what of a batch an exported graph is made for: shapes, and values that are none."""
    return [
        list(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(batch)
    ]


STYLE: Final = PipelineStyle()
WITH_DDP: Final = PipelineStyle(PipelineRecipe("ddp+pp", has_data_axis=True))
