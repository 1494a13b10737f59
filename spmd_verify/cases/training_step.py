"""The default training step: zero_grad, forward, loss, backward, update - and its variants.

One place for one device and for every style, so that all do the same mathematics; see
`variants` for the switches and docs/variants.md for what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify import refusals
from spmd_verify.blocks import blocks_of
from spmd_verify.cases.batches import cast_floating
from spmd_verify.cases.model_build import evaluating

if TYPE_CHECKING:
    from spmd_verify.cases.case import LoadedCase


@dataclass(frozen=True)
class Handling:
    """What a style does itself of a variant.

    Attributes:
        unsynchronised: Gives the context of a micro-step after which ranks need not exchange
            gradients, because another one follows.
        casts_parameters: Whether its model computes in the dtypes of `param_dtype` itself.
    """

    unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext
    casts_parameters: bool = False


ONE_DEVICE: Final = Handling()


def default_step(
    case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, handling: Handling = ONE_DEVICE
) -> Tensor:
    """Run one step and return the detached loss, 0-dim: of micro-steps the weighted sum.

    Raises:
        ReferenceRunError: `loss-not-scalar`, `loss-without-gradient`, `no-default-loss`.
        CaseError: `too-few-samples`.
    """
    for each in _listed(optimizer):
        each.zero_grad()
    parts = micro_batches(case, batch)
    total: Tensor | None = None
    for index, (part, share) in enumerate(parts):
        is_last = index == len(parts) - 1
        with nullcontext() if is_last else handling.unsynchronised():
            loss = forward_loss(case, model, part, handling)
            if share != 1.0:
                loss = loss * share
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    update(case, model, optimizer, handling)
    assert total is not None, "a batch has at least one part"
    return total


def update(
    case: LoadedCase, model: nn.Module, optimizer: Any, handling: Handling = ONE_DEVICE
) -> None:
    """Clip the gradients where the case says so, and let the optimizers step.

    Where gradients are reduced in a lower dtype, one device rounds them to it.
    """
    low = reduced_in(case)
    if low is not None and not handling.casts_parameters:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.to(low))
    if case.variants.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.variants.clip)
    for each in _listed(optimizer):
        each.step()


def _listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return a case's optimizers; most have one."""
    return optimizer if isinstance(optimizer, list) else [optimizer]


def forward_loss(
    case: LoadedCase, model: nn.Module, batch: Any, handling: Handling = ONE_DEVICE
) -> Tensor:
    """Run forward and loss on a batch, in the precision that the variants ask for, 0-dim.

    Raises:
        ReferenceRunError: `loss-not-scalar`, `loss-without-gradient`, `no-default-loss`.
    """
    args, kwargs, targets = case.split(batch)
    with autocast(case, model):
        output = forward(case, model, args, kwargs, handling)
        loss = case.loss(output, targets, batch_size=case.batch_size_of(batch))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise refusals.loss_not_scalar(case.address, got)
    if not loss.requires_grad:
        raise refusals.loss_without_gradient(case.address)
    return loss


def forward(
    case: LoadedCase,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handling: Handling = ONE_DEVICE,
) -> Any:
    """Run forward; where the style does not cast parameters itself, on cast copies of them.

    As fully_shard's policy does: buffers stay, floating inputs of the root and of every block are
    cast, outputs stay low. Not in the float64 twin, see `autocast`.
    """
    name = case.variants.param_dtype
    if not name or handling.casts_parameters or case.dtype != torch.float32:
        return model(*args, **kwargs)
    low: torch.dtype = getattr(torch, name)

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), low)

    parameters = {
        key: value.to(low) for key, value in model.named_parameters() if value.is_floating_point()
    }
    with ExitStack() as hooked:
        for path in ("", *blocks_of(case, model)):
            hook = model.get_submodule(path).register_forward_pre_hook(
                cast_inputs, prepend=True, with_kwargs=True
            )
            hooked.callback(hook.remove)
        return torch.func.functional_call(model, parameters, args, kwargs)


def reduced_in(case: LoadedCase) -> torch.dtype | None:
    """Return the dtype below float32 that gradients are reduced in; None where there is none."""
    name = case.variants.reduce_dtype or case.variants.param_dtype
    if name in ("", "float32") or case.dtype != torch.float32:
        return None
    low: torch.dtype = getattr(torch, name)
    return low


def evaluation_mode(case: LoadedCase, model: nn.Module) -> AbstractContextManager[None]:
    """Return the context of an eval forward that puts a model into evaluation mode and back.

    Modules come back into the mode they were in. Under `train_eval_train` the model is told by
    its own `eval()` and `train()`, as a training loop does it: a wrapper may get those wrong.
    """
    return _switched(model) if case.variants.train_eval_train else evaluating(model)


@contextmanager
def _switched(model: nn.Module) -> Iterator[None]:
    """Call `eval()`, and `train()` afterwards."""
    model.eval()
    try:
        yield
    finally:
        model.train()


@contextmanager
def evaluation(case: LoadedCase, model: nn.Module) -> Iterator[None]:
    """Run an eval forward: without gradients, in the case's modes and precision."""
    with torch.no_grad(), case.factory_mode(), autocast(case, model):
        yield


@contextmanager
def autocast(case: LoadedCase, model: nn.Module) -> Iterator[None]:
    """Run forward in the dtype that the case's autocast names.

    Not in the float64 twin of a case: autocast leaves float64 alone, so that the twin has no
    rounding of it and floors have all.
    """
    low = case.variants.autocast
    if not low or case.dtype != torch.float32:
        yield
        return
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype=getattr(torch, low)):
        yield


@contextmanager
def own_step(case: LoadedCase, model: nn.Module) -> Iterator[None]:
    """Run a step of the user's own: autocast is around the root's forward, not its loss.

    A context around the whole step would also be around backward, which torch warns against.
    """
    if not case.variants.autocast:
        yield
        return
    entered = ExitStack()

    def enter(*_: Any) -> None:
        entered.enter_context(autocast(case, model))

    def leave(*_: Any) -> None:
        entered.close()

    handles = [
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def micro_batches(case: LoadedCase, batch: Any) -> list[tuple[Any, float]]:
    """Return the micro-batches of a batch and each one's share of its samples.

    Micro-batch i of N has samples i, i + N, ...; leaves without a batch dim are in all of them.

    Raises:
        CaseError: `too-few-samples`.
    """
    count = case.variants.accumulate
    if count == 1:
        return [(batch, 1.0)]
    size = case.batch_size_of(batch)
    if size < count:
        raise refusals.too_few_samples(case.address, size, count)
    leaves, spec = pytree.tree_flatten(batch)
    dims = case.batch_dims
    return [
        (
            pytree.tree_unflatten(
                [
                    leaf if dim is None else every(leaf, dim, index, count)
                    for leaf, dim in zip(leaves, dims, strict=True)
                ],
                spec,
            ),
            -((index - size) // count) / size,
        )
        for index in range(count)
    ]


def every(tensor: Tensor, dim: int, first: int, stride: int) -> Tensor:
    """Return the slices `first, first + stride, ...` of a dim.

    As a view of `[..., rows, stride, ...]` where it divides: the engine keeps such a view in
    shards, and a slice with a stride not.
    """
    size = tensor.shape[dim]
    if size % stride == 0:
        return tensor.unflatten(dim, (size // stride, stride)).select(dim + 1, first)
    at = [slice(None)] * tensor.ndim
    at[dim] = slice(first, None, stride)
    return tensor[tuple(at)]
