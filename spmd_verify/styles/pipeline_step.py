"""A case's own `step(model, optimizer, batch)`, played around a pipeline schedule.

A schedule runs forward and backward itself. What the step does before the forward gives the
inputs of every micro-batch, what it does up to backward gives its loss, and what it does after
backward (clipping, the update) happens once, when the schedule is done. Only steps with one
forward and one backward can be taken apart so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.reference.trajectory import named_parameters, optimizers_of
from spmd_verify.seeding import RandomState

# What `clip_grad_norm_` calls for the norm of all gradients, torch 2.13 nn/utils/clip_grad.py.
_TOTAL_NORM = "_get_total_norm"


class _Reached(BaseException):
    """Ends a step at its forward or its backward; `value` is what was found there."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class StepForm:
    """What a step does around its forward and backward.

    Attributes:
        cleared: Parameters whose gradients it clears before backward.
        returns_loss: Whether it returns the loss it differentiates, and nothing else.
    """

    cleared: frozenset[str]
    returns_loss: bool


class _Played(nn.Module):
    """Stands for the model in a step: has a stage's parameters and a forward of one's own."""

    def __init__(self, stage: nn.Module, play: Callable[..., Any]) -> None:
        super().__init__()
        self._stage = [stage]  # in a list: no module of this one
        self._play = play

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what is asked at the step's forward."""
        return self._play(args, kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the stage's parameters."""
        return self._stage[0].named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear nothing: what the step clears before backward was cleared before the schedule."""


class OwnStep:
    """The step of a case on one rank."""

    def __init__(self, case: LoadedCase, stage: nn.Module, optimizer: Any) -> None:
        """Play `case.hooks.step` with this rank's stage and optimizer."""
        self.case = case
        self.stage = stage
        self.optimizer = optimizer

    def inputs(self, part: Any) -> tuple[Any, Any]:
        """Return `(args, kwargs)` that the step gives to the model for a micro-batch."""

        def play(args: Any, kwargs: Any) -> Any:
            raise _Reached((args, kwargs))

        return self._until(play, part)

    def loss(self, output: Any, part: Any) -> Tensor:
        """Return what the step differentiates, given the model's output."""

        def reached(loss: Tensor) -> None:
            raise _Reached(loss)

        state = RandomState.now()
        with on_backward(reached):
            loss = self._until(lambda _args, _kwargs: output, part)
        state.restore()
        return loss

    def rest(self, output: Any, part: Any, group: Any) -> None:
        """Do what the step does after backward, with clipping by the norm over all stages."""
        state = RandomState.now()
        with self._uncleared() as undo, global_norm(group), on_backward(lambda _: undo()):
            self.case.step(self._model(lambda _args, _kwargs: output), self.optimizer, part)
        state.restore()

    def _model(self, play: Callable[..., Any]) -> nn.Module:
        """Return what stands for the model."""
        return _Played(self.stage, play)

    def _until(self, play: Callable[..., Any], part: Any) -> Any:
        """Return what a step comes upon at its forward or backward."""
        try:
            with self._uncleared():
                self.case.step(self._model(play), self.optimizer, part)
        except _Reached as reached:
            return reached.value
        raise RuntimeError("the step ran no backward, in the rehearsal it did")

    @contextmanager
    def _uncleared(self) -> Iterator[Callable[[], None]]:
        """Keep the optimizers from clearing gradients; gives what ends that."""
        optimizers = optimizers_of(self.optimizer)
        for single in optimizers:
            single.__dict__["zero_grad"] = lambda *_args, **_kwargs: None

        def undo() -> None:
            for single in optimizers:
                single.__dict__.pop("zero_grad", None)

        try:
            yield undo
        finally:
            undo()


@contextmanager
def on_backward(reached: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function instead of every `Tensor.backward`."""
    original = Tensor.backward

    def backward(loss: Tensor, *_args: Any, **_kwargs: Any) -> None:
        reached(loss)

    Tensor.backward = backward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]


@contextmanager
def global_norm(group: Any) -> Iterator[None]:
    """Let torch's clipping use the norm of the gradients of all ranks of a group. Collective."""
    original = getattr(clip_grad, _TOTAL_NORM)

    def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        own = original(tensors, norm_type, *args, **kwargs)
        power = float(norm_type)
        if power == float("inf"):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return own
        powered = own**power
        dist.all_reduce(powered, group=group)
        return powered ** (1.0 / power)

    setattr(clip_grad, _TOTAL_NORM, total_norm)
    try:
        yield
    finally:
        setattr(clip_grad, _TOTAL_NORM, original)


def shared(
    output: Sequence[Tensor], like: Sequence[Tensor], device: torch.device, group: Any
) -> list[Tensor]:
    """Return the last stage's output on every rank of a group. Collective.

    Args:
        output: Its tensors on the last stage's rank; empty on others.
        like: Their sizes and dtypes.
        device: Where they are.
        group: The ranks of the stages, in order.
    """
    last = dist.get_global_rank(group, dist.get_world_size(group) - 1)
    values = [value.detach() for value in output] or [
        torch.empty(value.shape, dtype=value.dtype, device=device) for value in like
    ]
    for value in values:
        dist.broadcast(value, src=last, group=group)
    return [value.requires_grad_(value.is_floating_point()) for value in values]


def step_form(style: str, case: LoadedCase, model: nn.Module, part: Any) -> StepForm:
    """Run a step once on the whole model, without a schedule, and say what it does.

    Args:
        style: For messages.
        case: Has a step of its own.
        model: Whole; trained one step.
        part: A micro-batch.

    Raises:
        Unsupported: `own-step`, where it has not one forward and then one backward.
    """
    optimizer = case.optimizer(model)
    named = named_parameters(model)[0]
    events: list[str] = []
    losses: list[Tensor] = []
    cleared: list[str] = []
    original = Tensor.backward
    for value in named.values():
        value.grad = torch.ones_like(value)

    def on_forward(_module: nn.Module, _args: Any) -> None:
        is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        events.append("forward under autocast" if is_cast else "forward")

    def reached(loss: Tensor) -> None:
        events.append("backward")
        losses.append(loss.detach().clone())
        cleared.extend(n for n, p in named.items() if p.grad is None or not p.grad.any())
        original(loss)

    handles = [model.register_forward_pre_hook(on_forward)]
    handles += [
        single.register_step_pre_hook(lambda *_: events.append("update"))
        for single in optimizers_of(optimizer)
    ]
    with on_backward(reached):
        result = case.step(model, optimizer, part)
    for handle in handles:
        handle.remove()
    if events[:2] != ["forward", "backward"] or set(events[2:]) - {"update"}:
        raise Unsupported(
            f"{style} does not take this case: a schedule can run the forward and backward of a "
            f"step that has one of each and then updates. Its step(model, optimizer, batch) runs "
            f"{', '.join(events[:6]) or 'none'}. Write step_NAME with stages of your own",
            slug="own-step",
        )
    leaves = pytree.tree_leaves(result)
    is_loss = len(leaves) == 1 and isinstance(leaves[0], (Tensor, float))
    returns_loss = is_loss and float(leaves[0]) == float(losses[0])
    return StepForm(frozenset(cleared), returns_loss)
