"""Say why a tensor differs, by testing hypotheses against the statistics of the difference.

Each hypothesis is one function from `Evidence` to a cause or None; the one that leaves the
smallest residual wins. Where none leaves only noise the cause is `unexplained` and carries
the best residual: nothing is guessed. Kinds: verdicts.md part 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spmd_verify.merge import Merged, fit_factor
from spmd_verify.record import Cause
from spmd_verify.stored.store import Entry
from spmd_verify.verdict import limit, unit_roundoff


@dataclass(frozen=True)
class Evidence:
    """What is known of one differing tensor.

    Attributes:
        entry: The tensor in the reference.
        merged: The candidate against the reference.
        noise: Floor of the tensor norm.
        exact_norm: `||x64||`.
        axes: Mesh axes, `{name: ranks}`.
        ranks: Ranks concerned.
    """

    entry: Entry
    merged: Merged
    noise: float
    exact_norm: float
    axes: Mapping[str, int]
    ranks: list[int]

    @property
    def error(self) -> float:
        """Return `||candidate - x64||`."""
        return float(self.merged.squares.sum().sqrt())

    def holds(self, residual: float) -> bool:
        """Say whether a residual is only noise."""
        if not unit_roundoff(self.entry.dtype):
            return residual == 0.0  # integers do not round
        return residual <= limit(self.entry.dtype, "tensor") * self.noise

    def multiple(self, residual: float) -> float:
        """Return a residual as a multiple of the noise; inf where there is no noise."""
        if residual == 0.0:
            return 0.0
        return residual / self.noise if self.noise > 0.0 else math.inf


Fit = tuple[float, Cause]  # residual as a norm, what it says
Hypothesis = Callable[[Evidence], Fit | None]


def find_cause(evidence: Evidence) -> Cause:
    """Return the cause of a mismatch."""
    if evidence.merged.problems:
        return _cause(evidence, "unexplained", evidence.merged.problems[0], evidence.error)
    fits = [fit for hypothesis in HYPOTHESES if (fit := hypothesis(evidence)) is not None]
    holding = [fit for fit in fits if evidence.holds(fit[0])]
    if holding:
        return min(holding, key=lambda fit: fit[0])[1]
    best = min([residual for residual, _ in fits], default=evidence.error)
    return _cause(evidence, "unexplained", "no known cause fits", best)


def initial(evidence: Evidence) -> Fit | None:
    """`initial`: differs before step 0."""
    if evidence.entry.stage != "initial_state":
        return None
    between = " between ranks" if evidence.merged.copies_differ else ""
    text = f"{evidence.entry.name} differs{between} before step 0"
    return 0.0, _cause(evidence, "initial", text, 0.0)


def inputs(evidence: Evidence) -> Fit | None:
    """`inputs`: what reached the model is not the global batch's part."""
    if evidence.entry.stage != "inputs":
        return None
    text = f"{evidence.entry.name} is not what the global batch has there"
    return 0.0, _cause(evidence, "inputs", text, 0.0)


def factor(evidence: Evidence) -> Fit | None:
    """`factor`: `candidate = k * reference`, by least squares.

    One number always fits a factor, so for a tensor of one element only a factor with a
    meaning counts.
    """
    fit = fit_factor(evidence.merged)
    if fit is None or evidence.merged.non_finite:
        return None
    excess, residual = fit
    k = 1.0 + excess
    tolerance = max(4.0 * evidence.noise / evidence.exact_norm, 1e-12)
    meaning = factor_meaning(k, tolerance, evidence.axes)
    if math.prod(evidence.entry.shape) == 1 and not meaning:
        return None
    digits = f"{k:.7g}" if abs(excess) > 1e-5 else f"(1 {excess:+.2g})"
    text = f"{evidence.entry.name} is {digits} x the reference" + (
        f": {meaning}" if meaning else ""
    )
    cause = _cause(evidence, "factor", text, residual)
    cause.factor = k
    for name, size in evidence.axes.items():
        if meaning.endswith(name):
            cause.axis = name if size > 1 else None
    return residual, cause


def factor_meaning(k: float, tolerance: float, axes: Mapping[str, int]) -> str:
    """Return what a factor equals within its noise, such as `1 / ranks of dp`; else empty.

    Args:
        k: Fitted factor.
        tolerance: Its relative noise.
        axes: Mesh axes, `{name: ranks}`.
    """
    if abs(k) <= tolerance:
        return "it is zero"
    for name, size in axes.items():
        if size < 2:
            continue
        candidates = {
            f"ranks of {name}": float(size),
            f"1 / ranks of {name}": 1.0 / size,
            f"the square root of ranks of {name}": math.sqrt(size),
            f"1 / the square root of ranks of {name}": 1.0 / math.sqrt(size),
        }
        for text, value in candidates.items():
            if abs(k / value - 1.0) <= 2.0 * tolerance:
                return f"equals {text}"
    return ""


HYPOTHESES: Final[Sequence[Hypothesis]] = (initial, inputs, factor)


def _cause(evidence: Evidence, kind: str, text: str, residual: float) -> Cause:
    """Return a cause about one tensor."""
    return Cause(
        kind=kind,
        text=text,
        residual=evidence.multiple(residual),
        ranks=evidence.ranks,
        tensors=[evidence.entry.name],
    )


def exact_norm(store_value: Tensor) -> float:
    """Return the norm of a float64 reference, non-finite elements left out."""
    real = torch.view_as_real(store_value) if store_value.is_complex() else store_value
    return float(real.to(torch.float64).nan_to_num(posinf=0.0, neginf=0.0).norm())
