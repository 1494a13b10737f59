"""`batch_statistics` within a sample: a normalisation over the channels that a rank has."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected, module_of, value_before
from spmd_verify.causes.words import cause, ranks_text
from spmd_verify.record import Cause, Row

# Two numbers are fitted to every block: fewer elements than this would fit by chance.
_FEWEST: Final = 4


def channel_blocks(exhibit: Exhibit, row: Row) -> Cause | None:
    """`batch_statistics`: every block of channels has statistics of its own in every sample.

    A normalised value is a scale and a shift of what goes in, alike for all that share its
    statistics; so is the candidate of the reference, block by block.
    """
    module = module_of(exhibit, row.name)
    weight = getattr(module, "weight", None)
    found, whole = exhibit.assembled(row), exhibit.reference(row)
    if module is None or not isinstance(weight, Tensor) or weight.ndim != 1 or found is None:
        return None
    dims = [dim for dim in (1, found.ndim - 1) if found.ndim > 1 and
            found.shape[dim] == weight.shape[0]]  # fmt: skip
    if not dims:
        return None
    # Channels come last, but where they stand before places of an image.
    is_grouped = isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase))
    dim = dims[0] if is_grouped else dims[-1]
    path = row.name.partition("[")[0].partition("#")[0]
    scale = value_before(exhibit, f"{path}.weight", weight)
    bias = getattr(module, "bias", None)
    shift = torch.zeros_like(scale)
    if isinstance(bias, Tensor):
        shift = value_before(exhibit, f"{path}.bias", bias)
    if not bool(scale.all()):
        return None
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else 1
    plain = [(v.movedim(dim, -1) - shift) / scale for v in (found, whole)]
    for axis in exhibit.wide_axes:
        blocks = groups * exhibit.axes[axis]
        if weight.shape[0] % blocks or not _is_cut_along(exhibit, row, dim, axis):
            continue
        left = _left(plain[0], plain[1], blocks, scale, is_grouped=is_grouped)
        if left is None or left > 4.0 * exhibit.tolerance(row):
            continue
        each = weight.shape[0] // blocks
        text = (
            f"{row.name} ({type(module).__name__}) normalises every {each} channels by themselves, "
            f"on one device every {weight.shape[0] // groups}: ranks of {axis} have a part of the "
            f"channels, and take the statistics of what they have ({ranks_text(row.ranks)})"
        )
        return cause(
            "batch_statistics", text, residual=exhibit.multiple(row, left), axis=axis,
            tensors=[row.name, *affected(exhibit)], ranks=row.ranks,
            remedy=f"Add up sums and squares over {axis}, or give every rank whole groups: as many "
            "groups as there are divided by the ranks",
        )  # fmt: skip
    return None


def _is_cut_along(exhibit: Exhibit, row: Row, dim: int, axis: str) -> bool:
    """Say whether the ranks of an axis have other slices of a dim."""
    line = next(iter(exhibit.lines(axis, exhibit.locals(row))), [])
    parts = [exhibit.region(row, at) for at in line]
    return len({part.ranges[dim] for part in parts if part is not None}) == len(line) > 1


def _left(
    found: Tensor, whole: Tensor, blocks: int, scale: Tensor, *, is_grouped: bool
) -> float | None:
    """Return what a scale and a shift per sample and block leave, in the module's units.

    Args:
        found: [sample, ..., channels], without the module's own weight and bias.
        whole: The reference, likewise.
        blocks: Of channels.
        scale: The module's weight [channels].
        is_grouped: Whether all places of a sample share statistics; else each token has its own.
    """
    width = found.shape[-1] // blocks
    shape = (*found.shape[:-1], blocks, width)
    values = [value.reshape(shape).movedim(-2, 1) for value in (found, whole)]
    start = 2 if is_grouped else len(shape) - 1
    if math.prod(values[0].shape[start:]) < _FEWEST:
        return None
    own, right = (value.flatten(start) for value in values)
    centred = right - right.mean(-1, keepdim=True)
    power = centred.square().sum(-1, keepdim=True)
    k = ((own - own.mean(-1, keepdim=True)) * centred).sum(-1, keepdim=True)
    k = k / power.clamp(min=1e-300)
    left = (own - own.mean(-1, keepdim=True) - k * centred).reshape(values[0].shape)
    spread = left.movedim(1, -2).reshape(found.shape) * scale
    return float(spread.norm())
