"""What one device computes on a rank's part of the batch, in float64: for examinations.

Each run is one training step from the reference's state before it. It shares no code with
what it explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmd_verify.backward_mode import watching
from spmd_verify.boundaries import Boundaries
from spmd_verify.cases.batches import cast_floating
from spmd_verify.cases.case import LoadedCase
from spmd_verify.causes.given_gradients import GradientsGiven
from spmd_verify.noise.rounding import RandomRounding, without_onednn
from spmd_verify.reference.float64_mode import CaseDtypeDraws
from spmd_verify.reference.single import SingleDevice
from spmd_verify.reference.stepped import observed_step
from spmd_verify.reference.trajectory import (
    StepRecord,
    hyper_parameters,
    model_snapshot,
    named_parameters,
    normalised,
    restore,
    restore_hyper_parameters,
    snapshot,
)
from spmd_verify.stage_streams import StageStreams
from spmd_verify.stored.store import Store

# What backward left in `.grad`, as a stage of records of part runs: a step may change it before
# it is observed.
RAW = "raw"
# Numbers of the parameter groups after the step, likewise.
HYPER = "hyper_parameters"
# What a run does otherwise than the case: a context around its step, made for the model.
Intervention = Callable[[nn.Module], AbstractContextManager[Any]]
# Processor seconds for all hypotheses of a cell: an examination has a time limit (--timeout), and
# what was found before must not be lost to it. Those of the bench's models take less than 10.
MOST_SECONDS = 60.0
# Loss terms looked at: enough for auxiliary losses of a few layers.
MOST_TERMS = 24


@dataclass
class Term:
    """One 0-dim value that the loss is made of.

    Attributes:
        name: The function that made it, such as `add`.
        value: The number.
        gradients: Its own gradients, by parameter.
    """

    name: str
    value: float
    gradients: dict[str, Tensor]


@dataclass
class PartRuns:
    """Runs single steps of a case from the reference's state.

    Attributes:
        case: The case.
        store: The reference.
        run: `free` or `anchored`: whose state a step starts from.
        step: Which step.
        failures: What could not be run and why: hypotheses that need it are not tested.
        tried_seconds: What runs of hypotheses took.
        kept: Gradients of runs that several tensors are held against, by what was done in them.
    """

    case: LoadedCase
    store: Store
    run: str
    step: int
    device: SingleDevice = field(init=False)
    failures: list[str] = field(default_factory=list)
    tried_seconds: float = 0.0
    kept: dict[Hashable, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare builds."""
        self.device = SingleDevice(self.case)

    def record(
        self,
        batch: Any,
        draws: CaseDtypeDraws | None = None,
        *,
        in_float64: bool = True,
        is_micro: bool = False,
        rounding: int | None = None,
        within: Intervention | None = None,
    ) -> StepRecord | None:
        """Return everything of one step on a batch; None where it cannot be run.

        Args:
            batch: The batch.
            draws: Casts and traces what the step draws instead of the usual mode.
            in_float64: False for a run in the case's dtype.
            is_micro: The batch is what one forward gets: no micro-steps of its own.
            rounding: Seed of random rounding at operator outputs; None for none.
            within: Changes what the step does while it runs; see `interventions`.
        """
        case = self.device.twin if in_float64 else self.case
        if is_micro:
            case = case.with_variants(accumulate=1)
        if within is not None and self.tried_seconds > MOST_SECONDS:
            self.note(f"more hypotheses: those tried took {MOST_SECONDS:g} processor seconds")
            return None
        start = time.process_time()
        try:
            model, optimizer = self._prepared(in_float64=in_float64)
            rounded = _rounded(rounding, case.dtype)
            around = self._around(draws, in_float64=in_float64)
            meddled = nullcontext() if within is None else within(model)
            with around, rounded, meddled, _raw_gradients(model) as raw:
                found = observed_step(case)(model, optimizer, self._cast(batch, case.dtype))
            return {**found, RAW: raw, **snapshot(model, optimizer)}
        except Exception as error:  # noqa: BLE001 - user code on a batch nobody tried
            what = "a part of the batch" if within is None else "a hypothesis"
            self._failed(what, error)
            return None
        finally:
            self.tried_seconds += 0.0 if within is None else time.process_time() - start

    def pieces(
        self, batches: Sequence[Any], firsts: Sequence[str], *, in_float64: bool = True
    ) -> list[StepRecord] | None:
        """Return the steps on consecutive micro-batches, each from the same parameters.

        Buffers go on from one to the next, and all records have the last ones; every stage of a
        pipeline draws from a generator of its own. None where a step cannot be run.

        Args:
            batches: The micro-batches of a part of the batch, in order.
            firsts: Path of the first module of every stage.
            in_float64: False for runs in the case's dtype.
        """
        case = self.device.twin if in_float64 else self.case
        found = []
        try:
            model, optimizer = self._prepared(in_float64=in_float64)
            live = named_parameters(model)[0]
            before = {name: value.detach().clone() for name, value in live.items()}
            with self._around(in_float64=in_float64), StageStreams(model, firsts):
                for batch in batches:
                    with _raw_gradients(model) as raw:
                        record = observed_step(case)(
                            model, optimizer, self._cast(batch, case.dtype)
                        )
                    found.append({**record, RAW: raw})
                    with torch.no_grad():
                        for name, value in live.items():
                            value.copy_(before[name])
        except Exception as error:  # noqa: BLE001 - user code on a batch nobody tried
            self._failed("a micro-batch", error)
            return None
        buffers = model_snapshot(model)["buffers"]
        return [{**record, "buffers": buffers} for record in found]

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters before the step, float64."""
        model, _ = self._prepared()
        return {name: value.detach() for name, value in named_parameters(model)[0].items()}

    def raw_gradients(self, batch: Any) -> dict[str, Tensor] | None:
        """Return gradients as autograd left them, before the step changes them."""
        try:
            model, optimizer = self._prepared()
            with self._around(), _raw_gradients(model) as found:
                self.device.twin.step(model, optimizer, self._cast(batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("gradients before clipping", error)
            return None
        return found

    def updated(
        self,
        batch: Any,
        gradients: Mapping[str, Tensor],
        *,
        in_float64: bool = True,
        at_update: bool = False,
    ) -> StepRecord | None:
        """Return everything of a step that finds other gradients than its own.

        Args:
            batch: The batch.
            gradients: By parameter, as backward leaves them.
            in_float64: False for a run in the case's dtype.
            at_update: See `GradientsGiven`.

        Returns:
            None where the step cannot be run so; `failures` says why.
        """
        case = self.device.twin if in_float64 else self.case
        what = "the update with the gradients that the style promises"
        try:
            model, optimizer = self._prepared(in_float64=in_float64)
            given = GradientsGiven(model, optimizer, gradients, at_update=at_update)
            with self._around(in_float64=in_float64), given:
                found = observed_step(case, with_module_outputs=False)(
                    model, optimizer, self._cast(batch, case.dtype)
                )
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(what, error)
            return None
        if at_update and found["clipping"]:
            self.note(f"{what}: the step clips gradients that it makes itself")
            return None
        problem = given.problem()
        if problem is not None:
            self.note(f"{what}: {problem}")
            return None
        numbers = {name: torch.tensor(n) for name, n in hyper_parameters(optimizer).items()}
        return {**found, HYPER: numbers, **snapshot(model, optimizer)}

    def terms(self, batch: Any) -> list[Term]:
        """Return the 0-dim values that losses of the step are made of, latest first."""
        try:
            model, optimizer = self._prepared()
            scalars = _Scalars(model)
            with self._around(), scalars, watching(scalars.on_backward):
                self.device.twin.step(model, optimizer, self._cast(batch))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("terms of the loss", error)
            return []
        return scalars.terms[::-1]

    def untied_shares(self, name: str, aliases: list[str]) -> dict[str, Tensor]:
        """Return the gradient of each use of a tied parameter, by the use's name.

        Every alias becomes a parameter of its own with the same value.
        """
        try:
            model, optimizer = self._prepared()
            shared = named_parameters(model)[0][name]
            for alias in aliases:
                path, _, last = alias.rpartition(".")
                setattr(model.get_submodule(path), last, nn.Parameter(shared.detach().clone()))
            with self._around():
                batch = self._cast(self.case.batch(self.step))
                record = observed_step(self.device.twin)(model, optimizer, batch)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(f"the uses of {name} untied", error)
            return {}
        gradients = record["gradients"]
        return {use: gradients[use] for use in [name, *aliases] if use in gradients}

    def boundaries(self, *, in_float64: bool = True) -> Boundaries | None:
        """Return what passes the boundaries of modules in the step on the whole batch.

        Args:
            in_float64: False for a run in the case's dtype.
        """
        try:
            model, optimizer = self._prepared(in_float64=in_float64)
            named = [(normalised(raw), module) for raw, module in model.named_modules()]
            modules = [(name, module) for name, module in named if name or module is model]
            with self._around(in_float64=in_float64), Boundaries(modules) as found:
                case = self.device.twin if in_float64 else self.case
                case.step(model, optimizer, self._cast(self.case.batch(self.step), case.dtype))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("module boundaries", error)
            return None
        return found

    def _failed(self, what: str, error: Exception) -> None:
        """Keep why something could not be run, once."""
        self.note(f"{what}: {type(error).__name__}: {error}".partition("\n")[0])

    def note(self, said: str) -> None:
        """Keep what the report says could not be run, once."""
        if said not in self.failures:
            self.failures.append(said)

    def _prepared(self, *, in_float64: bool = True) -> tuple[nn.Module, Any]:
        """Return model and optimizer with the state before the step."""
        case = self.device.twin if in_float64 else self.case
        model, optimizer = self.device.build(in_float64=in_float64)
        if self.step > 0:
            with self._around(in_float64=in_float64):
                case.step(model, optimizer, self._cast(self.case.batch(0), case.dtype))
            restore(model, optimizer, self._state())
            restore_hyper_parameters(optimizer, self.store.index.hyper_parameters[self.step])
        return model, optimizer

    def _state(self) -> StepRecord:
        """Return the state before the step that the run started from."""
        before = self.step - 1
        if self.run == "anchored":
            return self.store.state(before)
        return {
            stage: {
                name: self.store.exact("free", before, stage, name)
                for name in self.store.names(before, stage)
            }
            for stage in ("parameters", "buffers", "optimizer_state")
        }

    @contextmanager
    def _around(
        self, draws: CaseDtypeDraws | None = None, *, in_float64: bool = True
    ) -> Iterator[None]:
        """Run a step from its seed, drawing in the case's dtype."""
        self.case.seed_step(self.step)
        case = self.device.twin if in_float64 else self.case
        with ExitStack() as stack:
            if draws is not None or self.case.dtype != case.dtype:
                stack.enter_context(draws or CaseDtypeDraws(self.case.dtype))
            stack.enter_context(case.factory_mode())
            yield

    def _cast(self, batch: Any, dtype: torch.dtype = torch.float64) -> Any:
        """Return a batch with floating leaves of a dtype."""
        return cast_floating(batch, dtype)


@contextmanager
def _rounded(seed: int | None, dtype: torch.dtype) -> Iterator[None]:
    """Round at random, as noise runs do; nothing without a seed."""
    if seed is None:
        yield
    else:
        with without_onednn(), RandomRounding(seed, dtype):
            yield


@contextmanager
def _raw_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give what backward leaves in `.grad` of every parameter, filled in while a step runs."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], None]:
        def on_finished(parameter: Tensor) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.detach().clone()

        return on_finished

    with ExitStack() as hooks:
        for name, parameter in named_parameters(model)[0].items():
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(keep(name))
                hooks.callback(handle.remove)
        yield found


class _Scalars(TorchFunctionMode):
    """Keeps 0-dim results that autograd follows, with their gradients, when backward starts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.terms: list[Term] = []
        self._found: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self.on_backward(args[0])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim == 0 and result.requires_grad:
            self._found.append((getattr(func, "__name__", "value"), result))
        return result

    def on_backward(self, loss: Tensor) -> None:
        """Take the gradients of what was found; the graph is gone after backward."""
        for name, value in self._found[-MOST_TERMS:]:
            if value is not loss:
                number = float(value.detach())
                self.terms.append(Term(name, number, _gradients(value, self.model)))
        self._found.clear()


def _gradients(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of one value, zeros where a parameter does not reach it."""
    named = {
        name: parameter
        for name, parameter in named_parameters(model)[0].items()
        if parameter.requires_grad
    }
    found = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient.detach()
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }
