"""Draw what an exact case starts from: small integers times a power of two.

All tensors are global. Draws depend on (seed, step) alone, are made in float64 and cast, and
leave torch's generators as they were: every process and every dtype gets the same values.
Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Non-zero weights of each output. Chosen: a sum grows by at most two bits in a layer, and
# still mixes several inputs, so that a missing or a misplaced part shows.
NONZERO_WEIGHTS: Final = 4
WEIGHTS: Final = (-1.0, 1.0)
# Biases and scales of normalisations: never zero, which would hide what is behind them.
VECTORS: Final = (-1.0, 1.0)
INPUTS: Final = (-2.0, -1.0, 0.0, 1.0, 2.0)
# An input of numbers with this many significant bits and exponents no larger is kept: masks,
# counts, weights of samples.
KEPT_BITS: Final = 4
KEPT_EXPONENT: Final = 6
BUFFER_BITS: Final = 3


def generator(seed: int, step: int, draw: int, kind: int) -> torch.Generator:
    """Return the random stream of one step's state (kind 0) or inputs (kind 1).

    Args:
        seed: The case's.
        step: From 0.
        draw: Which attempt at this step; see `ExactInfo.draws`.
        kind: 0 or 1.
    """
    number = 1_000_003 * (seed + 1) + 1009 * draw + 2 * step + kind
    return torch.Generator().manual_seed(number)


def draw_state(model: nn.Module, stream: torch.Generator) -> None:
    """Give every floating parameter new dyadic values, and buffers few bits, in place.

    Tied parameters are drawn once. Integer and complex tensors are left alone.
    """
    convolutions = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.modules.conv._ConvNd)
        and isinstance(weight := getattr(module, "weight", None), Tensor)
    }
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                rows = 1 if id(parameter) in convolutions else max(parameter.ndim - 1, 0)
                parameter.copy_(_weights(parameter.shape, rows, stream))
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(with_few_bits(buffer, BUFFER_BITS))


def draw_inputs(batch: Any, stream: torch.Generator) -> Any:
    """Return a batch with new dyadic values in its floating tensors.

    Integers are kept, and so are floating tensors of few bits, such as masks.
    """

    def drawn(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or has_few_bits(leaf):
            return leaf
        made = _choice(INPUTS, leaf.shape, stream).to(leaf.dtype)
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map_only(Tensor, drawn, batch)


def has_few_bits(value: Tensor) -> bool:
    """Say whether all finite elements have few bits; see `KEPT_BITS`."""
    finite = value.detach().to(torch.float64)
    finite = finite[finite.isfinite() & (finite != 0)]
    _, exponent = torch.frexp(finite)
    in_range = bool((exponent.abs() <= KEPT_EXPONENT).all())
    return in_range and torch.equal(with_few_bits(finite, KEPT_BITS), finite)


def with_few_bits(value: Tensor, bits: int) -> Tensor:
    """Return the nearest values with `bits` significant bits, float64; infinities stay."""
    mantissa, exponent = torch.frexp(value.to(torch.float64))
    rounded = torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)
    small = value.abs().to(torch.float64) < 2.0**-KEPT_EXPONENT
    return torch.where(value.isfinite(), rounded.masked_fill(small, 0.0), value.to(torch.float64))


def _weights(shape: Sequence[int], rows: int, stream: torch.Generator) -> Tensor:
    """Draw a parameter: `NONZERO_WEIGHTS` along the dims from `rows` on, vectors dense.

    Args:
        shape: Of the parameter.
        rows: Leading dims that count outputs.
        stream: Random numbers.
    """
    if len(shape) < 2 or not math.prod(shape):
        return _choice(VECTORS, shape, stream)
    terms = math.prod(shape[rows:])
    order = torch.rand((math.prod(shape[:rows]), terms), generator=stream, dtype=torch.float64)
    chosen = order.argsort(dim=1) < min(NONZERO_WEIGHTS, terms)
    return _choice(WEIGHTS, shape, stream) * chosen.reshape(tuple(shape))


def _choice(values: Sequence[float], shape: Sequence[int], stream: torch.Generator) -> Tensor:
    """Draw each element from `values`, float64."""
    picks = torch.randint(len(values), tuple(shape), generator=stream)
    return torch.tensor(values, dtype=torch.float64)[picks]
