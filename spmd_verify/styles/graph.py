"""The engine's own modes as styles: one captured step, partitioned for the mesh.

Which mode a style is stands in `graph_modes.py`. In processes every rank
compiles and runs its part with real collectives; in lockstep one compiled step holds the
parts of all ranks. Both show `Placed` values, so the rest is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import spmd
import spmd.lockstep
from spmd.errors import InternalError, LayoutError, SpmdError
from spmd.lockstep import CaptureCache
from spmd.session import CompiledStep
from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import evaluation, evaluation_mode
from spmd_verify.errors import Unsupported
from spmd_verify.garbage import collecting_later
from spmd_verify.layouts import is_partial, reduce_op
from spmd_verify.reference.observe import observed
from spmd_verify.reference.stepped import labels
from spmd_verify.reference.trajectory import (
    flatten,
    hyper_parameters,
    named_buffers,
    named_parameters,
    named_state,
    normalised,
    optimizers_of,
)
from spmd_verify.styles import graph_modes as modes
from spmd_verify.styles.base import Observation, Observed, StyleContext
from spmd_verify.styles.switches import recompute_blocks, refuse_compile, refuse_policy

Transformation = Callable[[fx.GraphModule], fx.GraphModule]

_SHARED = "spmd_verify.styles.graph"
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class GraphStyle:
    """One mode of the engine.

    Attributes:
        name: Id of the style.
        mode: `(case, context, mesh) -> ParallelMode`.
        transformation: Rewrites the local graph of the training step; for planted faults.
        decisions: Rewrites every local graph so that it decides as the reference did; for ties.
        runners: The runners that can run it.
        may_divide: Whether it may divide by a number of ranks; see `base.Style`.
    """

    name: str
    mode: modes.ModeFactory
    transformation: Transformation | None = None
    decisions: Transformation | None = None
    runners: frozenset[str] = frozenset({"processes", "lockstep"})
    may_divide: bool = False

    def build(self, case: LoadedCase, context: StyleContext) -> GraphRun:
        """Build model, optimizer and compiled step.

        Raises:
            Unsupported: The engine refuses the case, later ones when the step is captured.
        """
        return GraphRun(self, case, context)


class GraphRun:
    """One model under one mode; what the step returns is what was observed in it."""

    def __init__(self, style: GraphStyle, case: LoadedCase, context: StyleContext) -> None:
        """Build the model and compile the observed step; nothing is captured yet."""
        self.style = style
        self.case = case
        self.context = context
        self.mesh: Any = dict(context.axes)
        if not context.is_lockstep:
            self.mesh = context.kept("mesh", context.device_mesh)
        refuse_policy(style.name, case)
        refuse_compile(style.name, case)
        self.model = case.build_model().to(context.device)
        self.notes = recompute_blocks(style.name, case, self.model)
        self.optimizer = case.optimizer(self.model)
        self.shared: _Shared = context.shared.setdefault(_SHARED, _Shared())
        step = observed(case.step, labels=partial(labels, case))
        self.compiled = self._compile(step, "training", self.shared.training)

    def step(self, index: int, batch: Any) -> Observation:
        """Run one training step; see `StyleRun.step`."""
        del index  # the compiled step counts its calls itself
        before = hyper_parameters(self.optimizer)
        with _refusals():
            self.compiled(self.model, self.optimizer, self._on_device(batch))
        self.shared.look(self.compiled, self.model, self.optimizer, before)
        record: Mapping[str, Mapping[str, Any]] = self.compiled.results
        return {
            stage: {name: self._observed(placed) for name, placed in tensors.items()}
            for stage, tensors in record.items()
        }

    def state(self) -> Observation:
        """Return the live tensors; before the first step, those of the plain model."""
        state = self.compiled.state()
        if not state["parameters"]:
            return self._initial_state()
        names = {id(t): name for name, t in named_parameters(self.model)[0].items()}
        owners = sorted(names.values(), key=len, reverse=True)
        found: dict[str, dict[str, Observed]] = {
            stage: {normalised(name): self._held(placed) for name, placed in state[stage].items()}
            for stage in ("parameters", "buffers")
        }
        entries = {
            _state_name(name, owners): self._held(placed)
            for name, placed in state["optimizer_state"].items()
            if not name.startswith("hyper.")
        }
        for name, mapping, key in named_state(self.model, self.optimizer):
            if not isinstance(mapping[key], Tensor):
                number = torch.tensor(float(mapping[key]), dtype=torch.float64)
                entries[name] = self._whole(number)
        found["optimizer_state"] = entries
        return found

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers; the engine reads their groups at every call."""
        return optimizers_of(self.optimizer)

    def parameter_groups(self) -> list[list[str]] | None:
        """Return None: the optimizer is the case's own."""
        return None

    def release(self) -> None:
        """Do nothing: a graph gathers anew in every call."""

    def evaluate(self, batch: Any) -> Mapping[str, Observed] | None:
        """Run one eval forward, compiled under the same mode."""
        case = self.case

        def forward(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            args, kwargs, _ = case.split(batch)
            with evaluation(case, model):
                output = model(*args, **kwargs)
            return {path: tensor.detach().clone() for path, tensor in flatten(output, "model")}

        compiled = self._compile(forward, "evaluation", self.shared.evaluation)
        with evaluation_mode(case, self.model), _refusals():
            compiled(self.model, self._on_device(batch))
        return {name: self._observed(placed) for name, placed in compiled.results.items()}

    def locate(self, batch: Any) -> tuple[str, str | None] | None:
        """Return the first operator of the local graph that differs from the captured step."""
        found = self.compiled.localize(self.model, self.optimizer, self._on_device(batch))
        return None if found is None else (found.operator, found.line)

    def facts(self) -> Mapping[str, Any]:
        """Return fallbacks, collectives and captures of the training step."""
        return {
            "fallbacks": self.compiled.fallbacks,
            "collectives": self.compiled.collectives,
            "captures": self.compiled.captures,
            "notes": [*self.notes, *modes.notes_of(self.mode)],
        }

    def _compile(
        self, step: Callable[..., Any], what: str, captures: CaptureCache | None
    ) -> CompiledStep:
        """Compile a step under the style's mode for the context's runner."""
        with _refusals():
            mode = self.context.kept(f"{what} mode", lambda: self._mode(what))
            if what == "training":
                self.mode = mode
            compiled: CompiledStep
            if self.context.is_lockstep:
                lockstep = spmd.lockstep.compile(parallel_mode=mode, mesh=mode.mesh)
                compiled = lockstep(step)
            else:
                compiled = spmd.compile(parallel_mode=mode, batch="global")(step)
            compiled.shared = captures
            compiled.capturing = self._capturing
            return compiled

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Return the context of a capture."""
        with self.context.stopwatch("capture"), collecting_later():
            yield

    def _mode(self, what: str) -> spmd.ParallelMode:
        """Return the style's mode; both builds of a cell use the same one."""
        inner = self.style.mode(self.case, self.context, self.mesh)
        rewritings = [self.style.decisions]
        if what == "training":
            rewritings.insert(0, self.style.transformation)
        return _OncePerGraph(inner, [each for each in rewritings if each is not None])

    def _on_device(self, batch: Any) -> Any:
        """Return the global batch where the model is."""
        device = self.context.device
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    def _observed(self, placed: Any) -> Observed:
        """Return a result as the judge takes it, pending reductions done."""
        if self.context.is_lockstep:  # `compare` holds all parts and reduces them itself
            return self._held(placed)
        placements = list(placed.layout.placements)
        value = placed.local[0]
        for axis, placement in enumerate(placements):
            if is_partial(placement):
                value = value.clone()
                group = self.mesh.get_group(axis)
                dist.all_reduce(value, _REDUCTIONS[reduce_op(placement)], group)
                placements[axis] = spmd.Replicate()
        return Observed([value], tuple(placements), list(self.context.coordinates))

    def _held(self, placed: Any) -> Observed:
        """Return a held value as it is: the tensors stay the live ones."""
        return Observed(
            list(placed.local), placed.layout.placements, list(self.context.coordinates)
        )

    def _whole(self, tensor: Tensor) -> Observed:
        """Return a value that every rank of this process holds whole."""
        coordinates = list(self.context.coordinates)
        layout = tuple(spmd.Replicate() for _ in self.context.axes)
        return Observed([tensor.detach()] * len(coordinates), layout, coordinates)

    def _initial_state(self) -> Observation:
        """Return the model as it was built, whole on every rank."""
        parameters, buffers = named_parameters(self.model)[0], named_buffers(self.model)[0]
        return {
            "parameters": {name: self._whole(tensor) for name, tensor in parameters.items()},
            "buffers": {name: self._whole(tensor) for name, tensor in buffers.items()},
            "optimizer_state": {},
        }


class _OncePerGraph(spmd.ParallelMode):
    """A mode that partitions each captured graph once, however many builds run it.

    The free and the anchored build of a cell run the same programs; partitioning takes
    longer than the steps themselves.
    """

    def __init__(self, inner: spmd.ParallelMode, rewritings: Sequence[Transformation]) -> None:
        """Stand in for `inner`; `rewritings` rewrite what its passes return, in order."""
        self._inner = inner
        self._rewritings = rewritings
        self._local: dict[int, tuple[fx.GraphModule, fx.GraphModule]] = {}
        self._final: dict[int, fx.GraphModule] = {}
        self.mesh = inner.mesh
        self.gradient_reduction = inner.gradient_reduction
        self.rng = inner.rng

    def partition(self, gm: fx.GraphModule, *rest: Any) -> fx.GraphModule:
        """Return the local graph of `gm`, the same one each time."""
        if id(gm) not in self._local:
            self._inner.mesh, self._inner.strict = self.mesh, self.strict
            self._local[id(gm)] = gm, self._inner.partition(gm, *rest)
        return self._local[id(gm)][1]

    def transform_and_compile(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Return the local graph after the passes, the same one each time."""
        if id(gm) not in self._final:
            final = self._inner.transform_and_compile(gm)
            for rewrite in self._rewritings:
                final = rewrite(final)
            self._final[id(gm)] = final
        return self._final[id(gm)]

    @property
    def split(self) -> Any:
        """What the mode derived, for the notes."""
        return getattr(self._inner, "split", None)


class _Shared:
    """Captured steps that the builds of one case in this process share.

    A capture runs the step's Python; a build that takes one over does not. That is right as
    long as the Python leaves nothing behind that a later call reads. `look` finds out after
    the first call: numbers in the optimizer's state, hyper-parameters that the step changed
    outside of the graph. Then nothing is shared.
    """

    def __init__(self) -> None:
        """Begin without captures."""
        self.training: CaptureCache | None = CaptureCache()
        self.evaluation = CaptureCache()

    def look(
        self, compiled: CompiledStep, model: nn.Module, optimizer: Any, before: dict[str, float]
    ) -> None:
        """Stop sharing if the step just run left something behind in Python.

        Args:
            compiled: The step.
            model: Its model.
            optimizer: Its optimizer.
            before: Hyper-parameters before the call.
        """
        if self.training is None:
            return
        kinds = {spec.kind for spec in compiled.program.graph.meta["signature"].outputs}
        has_changed = "hyper" not in kinds and hyper_parameters(optimizer) != before
        has_numbers = any(
            not isinstance(mapping[key], Tensor)
            for _, mapping, key in named_state(model, optimizer)
        )
        if has_changed or has_numbers:
            self.training = None

    def without_places(self) -> _Shared | None:
        """Return what another process may start with: programs that use no slot at all.

        A slot is one of objects that this process made when it loaded the file. None where
        the training step is not shared.
        """
        if self.training is None:
            return None
        found = _Shared()
        for cache, kept in ((self.training, found.training), (self.evaluation, found.evaluation)):
            assert kept is not None, "just made"
            kept.programs = {
                key: program
                for key, program in cache.programs.items()
                if not program.python and not any(program.captured_places)
            }
        return found


def of_any_build(shared: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return of a cell's `StyleContext.shared` what ranks of another process can start with."""
    kept: _Shared | None = shared[_SHARED].without_places()
    return None if kept is None else {_SHARED: kept}


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the engine's refusals into `Unsupported`; faults of the engine pass as they are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (InternalError, LayoutError):
        raise
    except SpmdError as error:
        message = str(error).removesuffix(f"[{error.slug}]").strip()
        raise Unsupported(" ".join(message.split()), slug=error.slug) from error


def _state_name(name: str, owners: list[str]) -> str:
    """Return the checker's name of an optimizer state: `parameter.key`, `parameter.key[0]`.

    Args:
        name: The engine's name, `parameter.key` or `parameter.key.0`.
        owners: Parameter names, longest first.
    """
    owner = next((owner for owner in owners if name.startswith(f"{owner}.")), None)
    if owner is None:
        return name
    key, *rest = name.removeprefix(f"{owner}.").split(".")
    return f"{owner}.{key}" + "".join(f"[{part}]" for part in rest)


REPLICATE = GraphStyle("replicate", modes.data_parallel("replicate"))
FULLY_SHARD = GraphStyle("fully_shard", modes.data_parallel("fully_shard"))
DEFAULT = GraphStyle("default", modes.data_parallel("default"))
DTENSOR_EXPAND = GraphStyle("dtensor_expand", modes.dtensor_expand)
HYBRID = GraphStyle("spmd_hybrid", modes.hybrid_shard)
TENSOR = GraphStyle("spmd_tp", modes.tensor_parallel)
SEQUENCE = GraphStyle("spmd_sp", modes.sequence_parallel)
DATA_TENSOR = GraphStyle("spmd_dp_tp", modes.data_and_tensor_parallel)
