"""Which part of a global batch a rank gets: slices of every input along mesh axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.layouts import Coordinate, take


@dataclass(frozen=True)
class Chunk:
    """A torch.chunk split of one dim over one mesh axis."""

    dim: int


class Whole:
    """Every rank of the axis has the whole tensor."""


WHOLE: Final = Whole()
# Called with input path, its size along the dim, the axes that split it, and their ranks.
Check = Callable[[str, int, str, int], None]


def rank_part(
    case: LoadedCase,
    style: str,
    axes: Mapping[str, int],
    coordinate: Coordinate,
    batch: Any,
    check: Check | None = None,
) -> Any:
    """Return a rank's part of a global batch: torch.chunk's rule on every sharded dim.

    Args:
        case: Says how its inputs are sharded.
        style: For `input_sharding_NAME()`.
        axes: Mesh axes, `{name: ranks}`.
        coordinate: The rank's.
        batch: The global batch.
        check: Refuses sizes that the style cannot split.
    """
    sharding = case.sharding(tuple(axes), style)

    def part_of(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dims = sharding.get(path, {})
        layout: list[Chunk | Whole] = [
            WHOLE if (dim := dims.get(axis)) is None else Chunk(dim % leaf.ndim) for axis in axes
        ]
        split: dict[int, list[str]] = {}
        for axis, placement in zip(axes, layout, strict=True):
            if isinstance(placement, Chunk):
                split.setdefault(placement.dim, []).append(axis)
        for dim, along in split.items():
            if check is not None:
                check(path, leaf.shape[dim], " x ".join(along), math.prod(axes[a] for a in along))
        return take(leaf, layout, tuple(axes.values()), coordinate).contiguous()

    return map_leaves(case, batch, part_of)


def map_leaves(case: LoadedCase, batch: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a batch with `change(argument path, leaf)` for every leaf."""
    leaves, spec = pytree.tree_flatten(batch)
    changed = [change(path, leaf) for path, leaf in zip(case.leaf_paths, leaves, strict=True)]
    return pytree.tree_unflatten(changed, spec)
