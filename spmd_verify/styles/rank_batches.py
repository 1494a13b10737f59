"""A rank's part of the global batch, and the sizes that a style does not take."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.parts import rank_part
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.recipe import Recipe


def part_of(recipe: Recipe, case: LoadedCase, context: StyleContext, batch: Any) -> Any:
    """Return this rank's part of a global batch, where the model is.

    Raises:
        Unsupported: The recipe does not take parts of this size.
    """
    at = context.coordinates[0]
    part = rank_part(case, recipe.name, context.axes, at, batch, recipe.checked_part)
    refuse_few(recipe.name, case.batch_size_of(part), case.variants.accumulate)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(context.device), part)


def refuse_uneven(style: str, path: str, size: int, axis: str, ranks: int) -> None:
    """Refuse a batch that does not split evenly.

    Raises:
        Unsupported: `uneven-batch`.
    """
    if size % ranks == 0:
        return
    down, up = size - size % ranks, size + ranks - size % ranks
    works = f"{down} or {up}" if down else str(up)
    raise Unsupported(
        f"The batch does not split over the axis: {path} has {size} samples, {axis} has {ranks} "
        f"ranks, and {style} weighs every rank alike. Sizes that work: {works}",
        slug="uneven-batch",
    )


def refuse_few(style: str, size: int, micro_steps: int) -> None:
    """Refuse a rank's part with fewer samples than there are micro-steps.

    Raises:
        Unsupported: `too-few-samples`.
    """
    if size < micro_steps:
        raise Unsupported(
            f"A rank has too few samples: {size} for {micro_steps} micro-steps, and {style} "
            f"accumulates on every rank. Use --accumulate {size}, fewer ranks, or a larger batch",
            slug="too-few-samples",
        )


def refuse_empty(style: str, path: str, size: int, axis: str, ranks: int) -> None:
    """Refuse a batch that leaves a rank without samples.

    Raises:
        Unsupported: `empty-part`.
    """
    if -(-size // ranks) * (ranks - 1) >= size:
        raise Unsupported(
            f"A rank would get no samples: {path} has {size}, {axis} has {ranks} ranks, and "
            f"{style} runs forward on every rank. Sizes that work: multiples of {ranks}, or "
            f"shard it in step_{style} yourself and declare input_sharding_{style}()",
            slug="empty-part",
        )


def refuse_split(style: str, path: str, size: int, axis: str, ranks: int, *, divides: str) -> None:
    """Refuse an input that the case splits over the axis of a style that keeps inputs whole.

    Args:
        style: Its id.
        path: The input.
        size: Its entries along the dim that is split.
        axis: The axis.
        ranks: Its ranks.
        divides: What the style divides instead.

    Raises:
        Unsupported: `whole-inputs`.
    """
    raise Unsupported(
        f"The batch is split over the axis: input_sharding() divides {path} with {size} "
        f"entries over {axis} with {ranks} ranks. {style} keeps inputs whole and divides "
        f"{divides}. Leave {axis} out of input_sharding(), or write parallelize_my_{style}()",
        slug="whole-inputs",
    )
