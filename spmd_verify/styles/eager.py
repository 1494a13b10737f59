"""Styles that train a real module with real collectives: torch's own and the user's.

One process per rank. A rank builds the case's model, lets the style change it, and runs the
step on its part of the batch under an `Observer`. Design: docs/design.md 3.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import evaluation, evaluation_mode
from spmd_verify.dtensor_layouts import is_distributed, is_wrapper, local_part, reshard
from spmd_verify.errors import Unsupported
from spmd_verify.layouts import describe, region
from spmd_verify.parts import WHOLE
from spmd_verify.reference.naming import Names
from spmd_verify.reference.observe import Observer, positional_names
from spmd_verify.reference.stepped import labels
from spmd_verify.reference.trajectory import flatten, optimizers_of, parameter_groups
from spmd_verify.seeding import seed_all
from spmd_verify.styles.base import Observation, Observed, StyleContext
from spmd_verify.styles.gathering import Places, gathered, places
from spmd_verify.styles.inference import Ambiguous, infer
from spmd_verify.styles.rank_batches import part_of
from spmd_verify.styles.recipe import Recipe
from spmd_verify.styles.switches import compile_model, recompute_blocks, refuse_policy

# Stages whose tensors `gather_NAME` is asked about.
GATHERED_STAGES: Final = frozenset(
    {"gradients", "clipping", "parameters", "buffers", "optimizer_state"}
)
# A second tensor of one name on this rank, see `observe.Observer`.
_COPY: Final = re.compile(r"@\d+$")


@dataclass(frozen=True)
class EagerStyle:
    """One recipe as a style.

    Attributes:
        recipe: How the model is changed.
        runners: Real processes only.
    """

    recipe: Recipe
    runners: frozenset[str] = frozenset({"processes"})

    @property
    def name(self) -> str:
        """Return the recipe's id."""
        return self.recipe.name

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Build model, optimizer and step on this rank.

        Raises:
            Unsupported: Under lockstep, which has no ranks; an ambiguous layout.
        """
        self.check_runner(context)
        return EagerRun(self.recipe, case, context)

    def check_runner(self, context: StyleContext) -> None:
        """Refuse lockstep.

        Raises:
            Unsupported: `needs-processes`.
        """
        if context.is_lockstep:
            raise Unsupported(
                f"{self.name} trains real modules with real collectives, which lock-step has "
                f"not. Use --runner processes",
                slug="needs-processes",
            )


class EagerRun:
    """One model under one eager style on this rank."""

    def __init__(self, recipe: Recipe, case: LoadedCase, context: StyleContext) -> None:
        """Build the model, apply the style and find out what each rank holds."""
        self.recipe = recipe
        self.case = case
        self.context = context
        self.axes = dict(context.axes)
        self.coordinate = context.coordinates[0]
        self.mesh = context.kept("mesh", context.device_mesh)
        model = case.build_model().to(context.device)
        self.names = Names(model)
        self.argument_names = positional_names(model)
        self.is_entered = True
        self._local_shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[tuple[str, tuple[int, ...]], Places | None] = {}
        self.extra_notes: list[str] = []
        self.extra_facts: dict[str, Any] = {}  # of the style itself, for `repro`
        whole = {
            name: tensors[0].detach().clone()
            for kind in (self.names.parameters(model), self.names.buffers(model))
            for name, tensors in kind.items()
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        seed_all(case.seed)
        if not recipe.has_policy:
            refuse_policy(recipe.name, case)
        self.extra_notes += recompute_blocks(recipe.name, case, model)
        self.model, optimizer = recipe.apply(case, model, self.mesh)
        self.extra_notes += compile_model(recipe.name, case, self.model)
        self.optimizer = case.optimizer(self.model) if optimizer is None else optimizer
        self.layouts = self._layouts(whole)
        self.optimizer_steps = 0
        for single in self.optimizers():
            single.register_step_post_hook(self._on_optimizer_step)

    def step(self, index: int, batch: Any) -> Observation:
        """Run one training step; see `StyleRun.step`."""
        del index
        part = self._part(batch)
        observer = self.observer()
        with observer, self.case.factory_mode():
            for name, tensor in labels(self.case, part):
                observer.add("inputs", name, tensor)
            loss = self.train(part)
        self.is_entered &= observer.is_entered
        if loss is not None:
            observer.add_loss(loss)
        return {stage: self._seen(stage, tensors) for stage, tensors in observer.record.items()}

    def observer(self) -> Observer:
        """Return what watches a step."""
        is_compiled = bool(self.case.variants.torch_compile)
        observer = Observer(
            self.model,
            self.optimizer,
            names=self.names,
            argument_names=self.argument_names,
            with_module_outputs=not is_compiled,
        )
        observer.with_inputs = not is_compiled
        return observer

    def train(self, part: Any) -> Any:
        """Run one training step on this rank's part of the batch; return its loss."""
        return self.recipe.step(self.case, self.model, self.optimizer, part, self.mesh)

    def state(self) -> Observation:
        """Return the live tensors by the single-device model's names."""
        found: dict[str, dict[str, Observed]] = {
            "parameters": {},
            "buffers": {},
            "optimizer_state": {},
        }
        for stage, named in (
            ("parameters", self.names.parameters(self.model)),
            ("buffers", self.names.buffers(self.model)),
        ):
            for name, tensors in named.items():
                found[stage][name] = self._observed(stage, name, [t.detach() for t in tensors])
        for owner, key, container, at in self.names.state(self.model, self.optimizer):
            value = container[at]
            if not isinstance(value, Tensor):
                value = torch.tensor(float(value), dtype=torch.float64)
            found["optimizer_state"][f"{owner}.{key}"] = self._observed(
                "optimizer_state", owner, [value.detach()]
            )
        return found

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return `(name in the single-device model, module)`, "" for the root."""
        return self.names.modules(self.model)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers; their groups are live."""
        return optimizers_of(self.optimizer)

    def parameter_groups(self) -> list[list[str]] | None:
        """Return the parameters of every group; None where the optimizer holds other tensors."""
        if self.names.foreign(self.model, self.optimizer):
            return None
        names = {
            id(tensor): name
            for name, tensors in self.names.parameters(self.model).items()
            for tensor in tensors
        }
        return parameter_groups(names, self.optimizer)

    def evaluate(self, batch: Any) -> Mapping[str, Observed] | None:
        """Run one eval forward on this rank's part."""
        part = self._part(batch)
        with evaluation_mode(self.case, self.model), evaluation(self.case, self.model):
            output = self.recipe.evaluate(self.case, self.model, part, self.mesh)
        if output is None:
            return None
        return self._seen("eval_outputs", dict(flatten(output, "model")))

    def release(self) -> None:
        """Let fully_shard free what it has gathered."""
        reshard(self.model)

    def locate(self, batch: Any) -> tuple[str, str | None] | None:  # noqa: ARG002 - no graph
        """Return None: there is no graph to compare operators of."""
        return None

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says of this run."""
        wrappers = [type(module).__name__ for module in self.model.modules() if is_wrapper(module)]
        return {
            "notes": list(self._notes()),
            "facts": {
                "wrappers": wrappers,
                "is_entered": self.is_entered,
                "is_per_rank": self.recipe.is_per_rank,
                "optimizer_steps": self.optimizer_steps,
                "foreign": self.names.foreign(self.model, self.optimizer),
                "held": self.names.held(self.model, self.optimizer),
                "optimizers": [type(single).__name__ for single in self.optimizers()],
                "layouts": {name: describe(layout) for name, (layout, _) in self.layouts.items()},
                **self.extra_facts,
            },
        }

    def _on_optimizer_step(self, *_: Any) -> None:
        """Count the steps of optimizers."""
        self.optimizer_steps += 1

    def _notes(self) -> Iterator[str]:
        """Say what was inferred, and what of the optimizer is not the model's."""
        yield from self.extra_notes
        size = self.case.batch_size_of(self._part(self.case.batch(0)))
        count = self.case.variants.accumulate
        if size % count:
            yield (
                f"{count} micro-steps of {size} samples a rank: they hold other samples than those "
                f"of one device, which is the same where samples are independent"
            )
        inferred = {
            name: describe(layout)
            for name, (layout, is_inferred) in self.layouts.items()
            if is_inferred and describe(layout).strip("R,")
        }
        if inferred:
            shown = ", ".join(f"{name} {text}" for name, text in inferred.items())
            yield f"layouts inferred from shapes and initial values: {shown}"
        if not self.is_entered:
            yield "the wrapper's forward never ran: the step calls what it wraps"
        foreign = self.names.foreign(self.model, self.optimizer)
        if foreign:
            yield f"the optimizer holds {foreign} tensors that are not the model's parameters"

    # -- layouts -----------------------------------------------------------------------------

    def _layouts(self, whole: Mapping[str, Tensor]) -> dict[str, tuple[Any, bool]]:
        """Return the layout of every plain tensor of the model, and whether it was inferred."""
        found: dict[str, tuple[Any, bool]] = {}
        plain: dict[str, Tensor] = {}
        for named in (self.names.parameters(self.model), self.names.buffers(self.model)):
            for name, tensors in named.items():
                declared = self.recipe.layout(self.case, name, self.axes)
                is_gathered = self.recipe.has_gather and not is_distributed(tensors[0])
                self._local_shapes[name] = tuple(tensors[0].shape)
                if is_gathered and self._local_shapes[name] != self.shapes[name]:
                    continue
                if declared is not None:
                    found[name] = (declared, False)
                elif not is_distributed(tensors[0]):
                    plain[name] = tensors[0].detach()
        try:
            inferred = infer(plain, whole, self.axes, self.coordinate)
        except Ambiguous as error:
            raise Unsupported(
                f"The layout of a plain tensor cannot be told from its shape and initial "
                f"values: {error}. Say which in layout_{self.recipe.name}()",
                slug="ambiguous-layout",
            ) from error
        return {**found, **{name: (layout, True) for name, layout in inferred.items()}}

    def _seen(self, stage: str, tensors: Mapping[str, Tensor]) -> dict[str, Observed]:
        """Return what one stage showed, copies of one name together."""
        grouped: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            grouped.setdefault(_COPY.sub("", name), []).append(tensor)
        return {name: self._observed(stage, name, values) for name, values in grouped.items()}

    def _observed(self, stage: str, name: str, values: list[Tensor]) -> Observed:
        """Return tensors of one name with their layout.

        Gradients and state follow their parameter where they have its local shape; numbers,
        such as a step counter, are whole; of state of other shapes nobody says what it is.
        """
        gathered = self._gathered(stage, name, values)
        if gathered is not None:
            return gathered
        local, layout = local_part(values[0], self.mesh, self.axes)
        locals_ = [local, *(local_part(value, self.mesh, self.axes)[0] for value in values[1:])]
        if layout is None and stage in ("gradients", "clipping", "parameters", "buffers"):
            layout = self._plain_layout(name, local)
        elif layout is None and stage == "optimizer_state":
            layout = self._plain_layout(name, local)
            if layout is None and not local.ndim:
                layout = (WHOLE,) * len(self.axes)
        return Observed(locals_, layout, [self.coordinate] * len(locals_))

    def _gathered(self, stage: str, name: str, values: list[Tensor]) -> Observed | None:
        """Return the global tensor that `gather_NAME` makes of what the ranks hold. Collective."""
        key = (name, tuple(values[0].shape))
        if stage not in GATHERED_STAGES or not self.recipe.has_gather or len(values) > 1:
            return None
        if name not in self.shapes or is_distributed(values[0]):
            return None
        shape = tuple(values[0].shape)
        if shape == self.shapes[name] or shape != self._local_shapes.get(name):
            return None  # whole, so that every rank's copy is compared; or state of another shape
        gather = partial(self.recipe.gather, self.case)
        value = gathered(gather, name, values[0])
        if value is None or tuple(value.shape) != self.shapes[name]:
            return None
        if key not in self._places:
            self._places[key] = places(gather, name, values[0], value)
        place = self._places[key]

        def write(whole: Tensor) -> bool:
            if place is None:
                return False
            flat = values[0].reshape(-1).clone()
            flat[place[0]] = whole.reshape(-1)[place[1]].to(flat.dtype)
            values[0].copy_(flat.reshape(values[0].shape))
            return True

        return Observed([value], (WHOLE,) * len(self.axes), [self.coordinate], write)

    def _plain_layout(self, name: str, local: Tensor) -> Any:
        """Return the layout of a plain tensor that belongs to a parameter or buffer."""
        layout = self.layouts.get(name, (None, False))[0]
        if layout is None:
            return None
        part = region(self.shapes[name], layout, tuple(self.axes.values()), self.coordinate)
        return layout if part.shape == tuple(local.shape) else None

    def _part(self, batch: Any) -> Any:
        """Return this rank's part of a global batch, where the model is."""
        return part_of(self.recipe, self.case, self.context, batch)
