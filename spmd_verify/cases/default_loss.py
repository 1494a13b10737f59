"""The loss of a case that brings none: the output's own, or a fixed random projection.

The projection has few bits, so that it is the same number in every dtype, and does not
extend over the batch dim, so that the loss of parts averages to the loss of the whole.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify import refusals

PROJECTION_NOTE: Final = (
    "no loss given: the mean of the output times a fixed random projection is used"
)


def default_loss(output: Any, batch_size: int, where: str) -> Tensor:
    """Return a scalar loss made from a model's output.

    The first that exists: `output.loss` or `output["loss"]`; a 0-dim floating output; the
    only 0-dim floating member of a tuple or dict; the sum over floating leaves of the mean
    of each against its own projection.

    Args:
        output: What forward returned.
        batch_size: Samples in the batch that forward was given, global or local.
        where: The case's address, for the error.

    Raises:
        ReferenceRunError: `no-default-loss`.
    """
    ready = own_loss(output)
    if ready is not None:
        return ready
    leaves = [leaf for leaf in _leaves(output) if _is_differentiable(leaf)]
    if not leaves:
        raise refusals.no_default_loss(where, type(output).__name__)
    total = _projected(leaves[0], 0, batch_size)
    for index, leaf in enumerate(leaves[1:], start=1):
        total = total + _projected(leaf, index, batch_size)
    return total


def own_loss(output: Any) -> Tensor | None:
    """Return the loss an output carries itself; None where it carries none."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, Tensor):
        return output if _is_scalar(output) else None
    if isinstance(output, Mapping):
        members = list(output.values())
    else:
        members = list(output) if isinstance(output, (tuple, list)) else []
    scalars = [member for member in members if _is_scalar(member)]
    return scalars[0] if len(scalars) == 1 else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _is_differentiable(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _leaves(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output in order; dataclasses by field."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _leaves(getattr(output, field.name))


def _projected(leaf: Tensor, index: int, batch_size: int) -> Tensor:
    """Return the mean of one leaf times its projection."""
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    batch_dim = next((dim for dim, size in enumerate(leaf.shape) if size == batch_size), None)
    shape = tuple(1 if dim == batch_dim else size for dim, size in enumerate(leaf.shape))
    values = torch.tensor(_projection(_numel(shape), index), dtype=leaf.dtype, device=leaf.device)
    return (leaf * values.reshape(shape)).mean()


def _numel(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda product, size: product * int(size), shape, 1)


@functools.lru_cache(maxsize=64)
def _projection(numel: int, index: int) -> tuple[float, ...]:
    """Return odd multiples of 1/32 in (-1, 1): 5 bits, exact in every floating dtype."""
    stream = random.Random(1_000_003 * index + 17)
    return tuple((2 * stream.randrange(32) - 31) / 32 for _ in range(numel))
