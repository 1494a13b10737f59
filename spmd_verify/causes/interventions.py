"""What a run on one device may do otherwise than its case, so that a hypothesis can be tested.

A module's output, or the gradient at one of its boundaries, is another; indices count from 0 in
every part. Whatever a style is thought to do wrong is done on one device, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.part_runs import Intervention
from spmd_verify.norms import as_real
from spmd_verify.record import ROOT, Row
from spmd_verify.reference.trajectory import StepRecord, named_parameters, normalised

IN: Final = "in"
OUT: Final = "out"
Change = Callable[[Tensor], Tensor]
# Path of a module, and which of its sides.
Side = tuple[str, str]


def as_it_is(_model: nn.Module) -> AbstractContextManager[None]:
    """Change nothing: for a hypothesis that is in the batch."""
    return nullcontext()


def parameters_changed(changes: Mapping[str, Change]) -> Intervention:
    """Return what gives parameters, by name, other values before the step.

    By another name than its first one a tied parameter is changed in that use alone.
    """

    @contextmanager
    def within(model: nn.Module) -> Iterator[None]:
        first, others = named_parameters(model)
        owner_of = {alias: name for name, aliases in others.items() for alias in aliases}
        with torch.no_grad():
            for name, change in changes.items():
                if name in first:
                    first[name].copy_(change(first[name]))
                elif name in owner_of:
                    path, _, last = name.rpartition(".")
                    value = change(first[owner_of[name]].detach().clone())
                    setattr(model.get_submodule(path), last, nn.Parameter(value))
        yield

    return within


def outputs_changed(changes: Mapping[str, Change]) -> Intervention:
    """Return what replaces outputs of modules, by path; backward flows through the change."""

    @contextmanager
    def within(model: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for path, module in _named(model):
                change = changes.get(path)
                if change is not None:
                    hooks.callback(module.register_forward_hook(_on_output(change)).remove)
            yield

    return within


def gradients_changed(changes: Mapping[Side, Change]) -> Intervention:
    """Return what replaces gradients at boundaries of modules.

    The gradient at an input is what this module alone passes on.
    """

    @contextmanager
    def within(model: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for path, module in _named(model):
                leaving, entering = changes.get((path, OUT)), changes.get((path, IN))
                if leaving is not None:
                    handle = module.register_forward_hook(_on_output(_bent(leaving)))
                    hooks.callback(handle.remove)
                if entering is not None:
                    handle = module.register_forward_pre_hook(_on_input(_bent(entering)))
                    hooks.callback(handle.remove)
            yield

    return within


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules by the names that outputs have."""
    return [(normalised(name) if name else ROOT, module) for name, module in model.named_modules()]


def _on_output(change: Change) -> Callable[..., Any]:
    """Return a forward hook that changes the output, where it is one floating tensor."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        is_value = isinstance(output, Tensor) and output.is_floating_point()
        return change(output) if is_value else output

    return hook


def _on_input(change: Change) -> Callable[..., Any]:
    """Return a hook that changes the first input of a module."""

    def hook(_module: nn.Module, args: Any) -> Any:
        is_value = args and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return (change(args[0]), *args[1:]) if is_value else args

    return hook


def _bent(change: Change) -> Change:
    """Return what leaves a value alone and changes its gradient."""
    return lambda value: _Bent.apply(value, change)


class _Bent(torch.autograd.Function):
    """The same value, another gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Change) -> Tensor:
        """Keep the change for backward."""
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        """Change the gradient."""
        return ctx.change(gradients[0]), None


class CountingLocally(TorchFunctionMode):
    """Context in which `torch.arange` counts from 0 in each of several parts.

    Attributes:
        lengths: Of all ranges that start at 0 and count by 1.
    """

    def __init__(self, ranks: int, length: int | None = None) -> None:
        """Take how many parts there are, and of which length ranges are changed; None: none."""
        super().__init__()
        self.ranks = ranks
        self.length = length
        self.lengths: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change what `arange` gives."""
        found = func(*args, **(kwargs or {}))
        size = found.numel() if func is torch.arange else 0
        if size < 2 * self.ranks or size % self.ranks or [*found[:2]] != [0, 1]:
            return found
        self.lengths.add(size)
        return found % (size // self.ranks) if size == self.length else found


def side_text(side: Side) -> str:
    """Return `input of blocks.0`."""
    return f"{'input' if side[1] == IN else 'output'} of {side[0]}"


def part_of(index: int, size: int, dim: int) -> Change:
    """Return what leaves one of equal parts along a dim and sets the others to zero."""

    def change(value: Tensor) -> Tensor:
        parts = list(value.chunk(size, dim))
        kept = [p if i == index else torch.zeros_like(p) for i, p in enumerate(parts)]
        return torch.cat(kept, dim)

    return change


def in_order(order: Sequence[int], dim: int = 0) -> Change:
    """Return what puts equal blocks along a dim into an order."""

    def change(value: Tensor) -> Tensor:
        blocks = value.chunk(len(order), dim)
        return torch.cat([blocks[i] for i in order], dim)

    return change


def is_held(exhibit: Exhibit, row: Row, record: StepRecord | None) -> bool:
    """Say whether the ranks hold their parts of what a run gives."""
    value = None if record is None else record.get(row.stage, {}).get(row.name)
    held = exhibit.locals(row)
    if value is None or not held:
        return False
    return is_close(exhibit, row, as_real(value).to(torch.float64))


def is_close(exhibit: Exhibit, row: Row, value: Tensor) -> bool:
    """Say whether the tensor put together from the ranks is another, up to noise."""
    found = exhibit.assembled(row)
    if found is None or found.shape != value.shape:
        return False
    whole = float(exhibit.reference(row).norm())
    # Noise grows with what is computed.
    scale = max(1.0, float(value.norm()) / whole) if whole else 1.0
    return float((found - value).norm()) <= 4.0 * exhibit.tolerance(row) * scale


def are_gradients_held(exhibit: Exhibit, record: StepRecord | None) -> bool:
    """Say whether the ranks hold all gradients of a run: many numbers, where a loss is one."""
    rows = exhibit.mismatches("gradients")
    return bool(rows) and all(is_held(exhibit, row, record) for row in rows)


def is_loss_held(exhibit: Exhibit, row: Row, record: StepRecord) -> bool:
    """Say whether the ranks report the loss of a run, alike or as the mean over ranks."""
    value = next(iter(record.get("loss", {}).values()), None)
    values = [float(local.reshape(-1)[0]) for local in exhibit.locals(row).values()]
    if value is None or not values:
        return False
    mean = sum(values) / len(values)
    return abs(mean - float(value)) <= 4.0 * exhibit.tolerance(row)
