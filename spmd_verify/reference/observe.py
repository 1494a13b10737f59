"""Watch one training step from inside: inputs, module outputs, loss, gradients, clipping.

The same code watches the reference, eager ranks, and a step while it is traced on fake
tensors. Therefore it only clones and detaches; it reads no value, branches on none, draws no
random number, and every hook and patch is gone after the step, also when the step raises.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from spmd_verify.record import ROOT
from spmd_verify.reference.naming import Names
from spmd_verify.reference.trajectory import (
    StepRecord,
    flatten,
    named_parameters,
    normalised,
    optimizers_of,
)

Step = Callable[[nn.Module, Any, Any], Any]

# Stages that happen inside a step, in the order of verdict.STAGES.
INNER_STAGES: Final = ("inputs", "module_outputs", "loss", "gradients", "clipping")
# torch's clipping functions that change gradients; both reach the tensors by `_GROUPING`.
# Patching what they call, and not the functions themselves, also sees a step that did
# `from torch.nn.utils import clip_grad_norm_`. Source: torch 2.13 nn/utils/clip_grad.py.
_CLIPPING: Final = ("_clip_grads_with_norm_", "clip_grad_value_")
_GROUPING: Final = "_group_tensors_by_device_and_dtype"


def observed(
    step: Step,
    *,
    labels: Callable[[Any], Iterable[tuple[str, Tensor]]] | None = None,
    **options: Any,
) -> Callable[[nn.Module, Any, Any], StepRecord]:
    """Wrap a training step so that it returns what happened in it.

    Args:
        step: `(model, optimizer, batch) -> loss`.
        labels: Gives `(name, tensor)` of what the batch holds besides forward's arguments;
            recorded as `inputs`.
        options: Passed to `Observer`.

    Returns:
        A function of the same arguments that returns `{stage: {name: tensor}}` for
        `INNER_STAGES`; stages in which nothing happened are empty. Tensors are detached
        copies with the step's own dtypes and layouts (local where the model's are).
    """

    def observed_step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
        with Observer(model, optimizer, **options) as observer:
            for name, tensor in labels(batch) if labels else ():
                observer.add("inputs", name, tensor)
            loss = step(model, optimizer, batch)
        observer.add_loss(loss)
        return observer.record

    return observed_step


class Observer:
    """Context around one training step that fills `record`.

    `with_inputs`, set before it is entered, says whether the root's forward is hooked.
    `is_entered` is False where the model is a wrapper whose own forward never ran.

    A second value of the same name in one step (a module used twice, a second forward) is
    named `name#2`, and so on. Forwards that run inside backward (activation checkpointing)
    are recomputation and not recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        argument_names: Sequence[str] | None = None,
        with_module_outputs: bool = True,
        order_gradients: bool = False,
        names: Names | None = None,
    ) -> None:
        """Remember what to watch; nothing is hooked before `__enter__`.

        Args:
            model: The module the step calls, wrapped or not.
            optimizer: One optimizer or several.
            argument_names: Names of positional arguments of the root's forward; read from
                the innermost wrapped module's signature when left out.
            with_module_outputs: Whether to hook every module.
            order_gradients: Record gradients in the order autograd finished them. Needs
                leaf hooks, so it is for eager single-device runs.
            names: What a style's model calls its parts; by their paths when left out. A second
                tensor of one name (a broken tie) is recorded as `name@1`.
        """
        self.model = model
        self.optimizers = optimizers_of(optimizer)
        self.argument_names = argument_names
        self.with_inputs = True
        self.with_module_outputs = with_module_outputs
        self.order_gradients = order_gradients
        self.names = names
        self.is_entered = True
        self._undo = ExitStack()
        self.restart()

    def restart(self) -> None:
        """Begin another step with an empty record; what was hooked stays so."""
        self.record: StepRecord = {stage: {} for stage in INNER_STAGES}
        self._finished: dict[str, None] = {}
        self._stepping: set[int] = set()
        self._is_clipped = False
        self._has_gradients = False

    def __enter__(self) -> Observer:
        with ExitStack() as undo:
            self._hook_modules(undo)
            self._hook_gradients(undo)
            original = getattr(clip_grad, _GROUPING)
            setattr(clip_grad, _GROUPING, self._watched_grouping(original))
            undo.callback(setattr, clip_grad, _GROUPING, original)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()
        if kind is None and not self._has_gradients:
            self._read_gradients()

    def add_loss(self, value: Any) -> None:
        """Record what the step returned: `loss`, or `loss` with the path inside containers."""
        if isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        for path, tensor in flatten(value, "loss"):
            self.add("loss", path, tensor)

    def add(self, stage: str, name: str, tensor: Tensor) -> None:
        """Record a copy under `name`, or `name#2` and so on if that is taken.

        Inside `torch.func.vmap` or `grad` a tensor stands for something else than its values
        and means nothing outside; it is passed over. So is a nested tensor, which the judge
        cannot compare.
        """
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_nested:
            return
        taken, count, unique = self.record[stage], 1, name
        while unique in taken:
            count += 1
            unique = f"{name}#{count}"
        taken[unique] = tensor.detach().clone()

    # -- forward -----------------------------------------------------------------------------

    def _hook_modules(self, undo: ExitStack) -> None:
        """Hook the root's inputs and, if asked, every module's outputs."""
        if not self.with_inputs and not self.with_module_outputs:
            return
        root = dict(self._modules()).get("", self.model)
        if self.with_inputs:
            handle = root.register_forward_pre_hook(self._on_inputs, with_kwargs=True)
            undo.callback(handle.remove)
        if root is not self.model:
            undo.callback(self.model.register_forward_pre_hook(self._on_entry).remove)
            self.is_entered = False
        if not self.with_module_outputs:
            return
        for name, module in self._modules():
            hook = self._output_hook(name or ROOT)
            undo.callback(module.register_forward_hook(hook).remove)

    def _on_entry(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Note that the wrapper's forward ran, and not only what it wraps."""
        self.is_entered = True

    def _on_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record what reached the root's forward, by dotted argument path."""
        if is_in_backward():
            return
        names = self.argument_names or positional_names(module)
        for i, value in enumerate(args):
            name = names[i] if i < len(names) else f"inputs.{i}"
            for path, tensor in flatten(value, name):
                self.add("inputs", dotted(path), tensor)
        for path, tensor in flatten(kwargs):
            self.add("inputs", dotted(path), tensor)

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook that records a module's output under its name."""

        def on_output(_module: nn.Module, _args: Any, output: Any) -> None:
            if not is_in_backward():
                for path, tensor in flatten(output, name):
                    self.add("module_outputs", path, tensor)

        return on_output

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules to watch; what wrappers wrap is left out: its output is the root's."""
        if self.names is not None:
            return self.names.modules(self.model)
        named = [(normalised(raw), module) for raw, module in self.model.named_modules()]
        return [(name, module) for name, module in named if name or module is self.model]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the live parameters by name."""
        if self.names is None:
            return named_parameters(self.model)[0]
        return {
            name if not at else f"{name}@{at}": tensor
            for name, tensors in self.names.parameters(self.model).items()
            for at, tensor in enumerate(tensors)
        }

    # -- backward and update -----------------------------------------------------------------

    def _hook_gradients(self, undo: ExitStack) -> None:
        """Read gradients just before any optimizer steps; note their order if asked."""
        for single in self.optimizers:
            for handle in (
                single.register_step_pre_hook(self._on_optimizer_step),
                single.register_step_post_hook(self._after_optimizer_step),
            ):
                undo.callback(handle.remove)
        if not self.order_gradients:
            return
        for name, parameter in self._parameters().items():
            if parameter.requires_grad and parameter.is_leaf:
                hook = self._finished_hook(name)
                undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)

    def _finished_hook(self, name: str) -> Callable[[Tensor], None]:
        """Return a hook that notes when a gradient was finished; the last time counts."""

        def on_finished(_parameter: Tensor) -> None:
            self._finished.pop(name, None)
            self._finished[name] = None

        return on_finished

    def _on_optimizer_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record gradients, or what clipping left of them, for one optimizer's parameters.

        A step that calls its base class's step has its hooks called once more, inside: torch
        wraps the step of every class that was ever built.
        """
        if id(optimizer) in self._stepping:
            return
        self._stepping.add(id(optimizer))
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._is_clipped:
            self._read_gradients(members if len(self.optimizers) > 1 else None)
            return
        for name, parameter in self._parameters().items():
            if id(parameter) in members and parameter.grad is not None:
                self.add("clipping", name, parameter.grad)

    def _after_optimizer_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Note that a step is over."""
        self._stepping.discard(id(optimizer))

    def _read_gradients(self, members: set[int] | None = None) -> None:
        """Record the gradients of `members`, or of all parameters, as they are now."""
        self._has_gradients = True
        live = self._parameters()
        ordered = [*self._finished, *(name for name in live if name not in self._finished)]
        for name in ordered:
            parameter = live[name]
            if (members is None or id(parameter) in members) and parameter.grad is not None:
                self.add("gradients", name, parameter.grad)

    def _watched_grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's grouping function, telling us when clipping is about to start."""

        def grouping(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_code.co_name in _CLIPPING:
                self._on_clipping(caller)
            return original(*args, **kwargs)

        return grouping

    def _on_clipping(self, caller: FrameType) -> None:
        """Record gradients before they are changed, and the norm they are clipped by."""
        if not self._is_clipped:
            self._read_gradients()
        self._is_clipped = True
        total_norm = caller.f_locals.get("total_norm")
        if isinstance(total_norm, Tensor):
            with torch.no_grad():
                factor = caller.f_locals["max_norm"] / (total_norm + 1e-6)
                self.add("clipping", "total_norm", total_norm)
                self.add("clipping", "clip_factor", torch.clamp(factor, max=1.0))


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of forward's positional parameters, of what wrappers wrap."""
    inner = module
    while isinstance(wrapped := getattr(inner, "module", None), nn.Module):
        if "forward" not in type(inner).__dict__ or not _takes_anything(inner):
            break
        inner = wrapped
    try:
        parameters = inspect.signature(inner.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(entry.name for entry in parameters if entry.kind in kinds)


def dotted(path: str) -> str:
    """Return an argument path with `.i` where `flatten` writes `[i]`."""
    return path.replace("[", ".").replace("]", "")


def _takes_anything(module: nn.Module) -> bool:
    """Say whether forward is `(*args, **kwargs)`, as a wrapper's is."""
    kinds = {entry.kind for entry in inspect.signature(module.forward).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def is_in_backward() -> bool:
    """Say whether autograd is running backward in this thread.

    Source: torch 2.13, torch/utils/checkpoint.py asks the same question the same way.
    """
    return torch._C._current_graph_task_id() != -1
