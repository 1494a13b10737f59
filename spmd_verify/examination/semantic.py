"""Tell a style that does what it promises per rank from one that is wrong.

DistributedDataParallel and fully_shard promise the mean over ranks of what each rank computes
on its part of the batch, a pipeline the mean over the micro-batches of a part. Where that is what
the ranks hold, and one device computes something else on the whole batch, the difference is one
of meaning: the verdict is `semantic`. Pure functions of float64 records; see verdicts.md part 9.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from spmd_verify.layouts import Coordinate
from spmd_verify.norms import as_real, is_rounding
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.verdict import limit

# What float64 may leave of a composition, relative to the value; behind float32 islands the
# second would do. Source: verdicts.md part 3 (legal noise runs).
_LEGAL: Final = 1e-9
_LEGAL_FIT: Final = 1e-6
# Floors are measured on the whole batch; a part has fewer samples to normalise over and its
# rounding weighs more. Measured: batch norms over 4 of 8 images, 1.2 times the limit.
_PARTS: Final = 4.0
_CALL: Final = re.compile(r"#\d+$")
_REMEDIES: Final[dict[str, str]] = {
    "batch_statistics": "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before wrapping, "
    "or a normalisation within the sample such as GroupNorm",
    "random_stream": "Compare with dropout 0, or draw what the global batch needs from one "
    "generator and give each rank its rows",
    "mean_of_means": "Sum the losses and divide by the denominator of the global batch: reduce "
    "the count over the ranks first, and multiply by the ranks what the style averages",
    "cross_sample": "Gather the samples of all ranks, with gradients, before they are coupled",
    "factor": "Divide the loss by the samples of the global batch, or multiply it by the ranks "
    "before backward",
}
_REMEDIES_OF_PIECES: Final[dict[str, str]] = {
    "batch_statistics": "Use a normalisation within the sample, such as GroupNorm",
    "random_stream": "Compare with dropout 0",
    "mean_of_means": "Sum the losses of the micro-batches and divide by the denominator of the "
    "whole batch: ScheduleGPipe(..., scale_grads=False)",
    "cross_sample": "Compute what couples samples per sample, or train with one micro-batch",
    "factor": "Give a loss that is a mean over samples, or ScheduleGPipe(..., scale_grads=False)",
}


@dataclass(frozen=True)
class PerRank:
    """One step of a per-rank style beside what one device computes.

    All tensors are float64 and global, except that `parts` and `held` are about each rank's
    part of the batch.

    Attributes:
        style: Its name, for the text.
        reference: The step on the whole batch.
        parts: The step on each rank's part alone, from the same state and seed.
        weights: How much each rank's gradient counts in the style: 1 / ranks each.
        gradients: The style's own, by name.
        held: Loss and buffers of each rank.
        noise: Floor of `(stage, name)`, as a norm; 0 where it is unknown.
        dtype: The case's.
        classes: Class of the module that an output is named after.
        draws: Operators that drew random numbers in the step, with their places.
        rounded: `parts` in the case's dtype: how far rounding moves them. A part of two samples
            may round much more than the whole batch, whose floors `noise` has.
        pieces: What a part is the mean of, all parts' one after the other: the steps on their
            micro-batches. Empty where each part is run as one.
        repeats: Ranks that have the samples of an earlier one, as those of an axis `tp` do: their
            forward is the same one, and what composes the whole batch has it once.
    """

    style: str
    reference: StepRecord
    parts: Mapping[Coordinate, StepRecord]
    weights: Mapping[Coordinate, float]
    gradients: Mapping[str, Tensor]
    held: Mapping[Coordinate, Mapping[str, Mapping[str, Tensor]]]
    noise: Mapping[tuple[str, str], float]
    dtype: str
    classes: Mapping[str, str] = field(default_factory=dict)
    draws: Sequence[str] = ()
    rounded: Mapping[Coordinate, StepRecord] = field(default_factory=dict)
    pieces: Sequence[StepRecord] = ()
    repeats: frozenset[Coordinate] = frozenset()

    @property
    def forwards(self) -> Sequence[StepRecord]:
        """Return what was run as one forward each: micro-batches, or the distinct parts."""
        own = (record for at, record in self.parts.items() if at not in self.repeats)
        return self.pieces or list(own)

    @property
    def unit(self) -> str:
        """Return what such a forward is called."""
        return "micro-batch" if self.pieces else "rank"


@dataclass(frozen=True)
class Semantic:
    """Why a per-rank style differs although it does what it promises.

    Attributes:
        kind: `batch_statistics`, `random_stream`, `mean_of_means`, `cross_sample`, `factor`.
        text: One sentence.
        residual: What the promise leaves of the style's gradients, in multiples of the noise.
        remedy: What to change.
        tensors: What differs first, then the gradients concerned.
        factor: For `factor`: the style's gradients over the reference's.
    """

    kind: str
    text: str
    residual: float
    remedy: str
    tensors: tuple[str, ...]
    factor: float | None = None


def semantic(found: PerRank) -> Semantic | None:
    """Return what a difference means, None where the style does not hold its promise."""
    if len(found.parts) < 2 or not found.gradients:
        return None
    combined = {name: combination(found, name) for name in found.gradients}
    residual = _residual(found, combined)
    if not residual <= 1.0 or not _holds_own(found):
        return None
    concerned = tuple(name for name, value in combined.items() if _is_off(found, name, value))
    kind, first, text, factor = _why(found)
    if not concerned and kind != "batch_statistics":
        return None
    tensors = tuple(dict.fromkeys((*first, *concerned)))
    times = residual * _PARTS * limit(found.dtype, "tensor")
    remedies = _REMEDIES_OF_PIECES if found.pieces else _REMEDIES
    return Semantic(kind, text, times, remedies[kind], tensors, factor)


def combination(found: PerRank, name: str) -> Tensor:
    """Return the gradient that the style promises: the weighted sum over ranks, any shape."""
    return _combined(found, found.parts, name)


def _combined(found: PerRank, parts: Mapping[Coordinate, StepRecord], name: str) -> Tensor:
    """Return the weighted sum over ranks of the parts' gradients."""
    total = torch.zeros_like(found.gradients[name])
    for coordinate, record in parts.items():
        value = record.get("gradients", {}).get(name)
        if value is not None:
            total = total + found.weights[coordinate] * value
    return total


def _multiple(found: PerRank, name: str, promised: Tensor) -> float:
    """Return the error of a gradient against the promise as a share of what is noise."""
    error = float((as_real(found.gradients[name]) - as_real(promised)).norm())
    allowed = allowance(found, name, promised)
    if error == 0.0:
        return 0.0
    return error / allowed if allowed > 0.0 and math.isfinite(error) else math.inf


def allowance(found: PerRank, name: str, promised: Tensor) -> float:
    """Return the error of a promised gradient that is noise, as a norm.

    Floors are of the whole batch's run; parts have larger gradients where they cancel in it.
    """
    whole = found.reference.get("gradients", {}).get(name)
    size = float(promised.abs().norm())
    growth = max(1.0, size / float(whole.abs().norm())) if whole is not None and whole.any() else 1
    floor = max(found.noise.get(("gradients", name), 0.0) * growth, _unit(found.dtype) * size)
    if len(found.rounded) == len(found.parts):
        rounded = _combined(found, found.rounded, name)
        floor = max(floor, float((as_real(rounded) - as_real(promised)).norm()))
    return _PARTS * limit(found.dtype, "tensor") * floor


def holds(found: PerRank) -> bool:
    """Say whether gradients, losses and buffers are what the style promises."""
    if len(found.parts) < 2 or not found.gradients:
        return False
    promised = {name: combination(found, name) for name in found.gradients}
    return _residual(found, promised) <= 1.0 and _holds_own(found)


def _residual(found: PerRank, promised: Mapping[str, Tensor]) -> float:
    """Return the largest error of a gradient against the promise as a share of what is noise."""
    return max(_multiple(found, name, value) for name, value in promised.items())


def _unit(dtype: str) -> float:
    """Return the relative step of a dtype."""
    return float(torch.finfo(getattr(torch, dtype)).eps)


def _is_off(found: PerRank, name: str, promised: Tensor) -> bool:
    """Say whether the promised gradient is another than the whole batch's."""
    whole = found.reference.get("gradients", {}).get(name)
    if whole is None:
        return bool(promised.any())
    floor = found.noise.get(("gradients", name), 0.0)
    allowed = max(limit(found.dtype, "tensor") * floor, _LEGAL * float(whole.abs().norm()))
    return float((promised - whole).abs().norm()) > allowed


def _holds_own(found: PerRank) -> bool:
    """Say whether loss and buffers of every rank are those of its part, or of the first one's.

    A loss may be reported reduced; buffers may have been sent by the first rank.
    """
    coordinates = list(found.parts)
    for coordinate, stages in found.held.items():
        own = found.parts.get(coordinate)
        if own is None:
            return False
        first = found.parts[coordinates[0]]
        for stage in ("loss", "buffers"):
            for name, value in stages.get(stage, {}).items():
                allowed = [record.get(stage, {}).get(name) for record in (own, first)]
                if stage == "loss":
                    allowed = [allowed[0], _mean(found, name)]
                spread = _spread(found, stage, name)
                if not any(_is_near(found, (stage, name), value, e, spread) for e in allowed):
                    return False
    return True


def _mean(found: PerRank, name: str) -> Tensor | None:
    """Return the mean of the parts' losses."""
    values = [record.get("loss", {}).get(name) for record in found.parts.values()]
    known = [value.double() for value in values if value is not None]
    return torch.stack(known).mean(0) if len(known) == len(values) else None


def _spread(found: PerRank, stage: str, name: str) -> float:
    """Return the largest error that rounding makes in any part's value."""
    errors = [0.0]
    for coordinate, record in found.rounded.items():
        value = record.get(stage, {}).get(name)
        exact = found.parts.get(coordinate, {}).get(stage, {}).get(name)
        if value is not None and exact is not None and value.shape == exact.shape:
            errors.append(float((value.double() - exact.double()).norm()))
    return max(errors)


def _is_near(
    found: PerRank, key: tuple[str, str], value: Tensor, expected: Tensor | None, spread: float
) -> bool:
    """Say whether a value is the expected one within noise."""
    if expected is None or value.shape != expected.shape:
        return False
    size = float(expected.double().norm())
    floor = max(found.noise.get(key, 0.0), _unit(found.dtype) * size, spread)
    error = float((value.double() - expected.double()).norm())
    return error <= _PARTS * limit(found.dtype, "tensor") * floor


# -- why ---------------------------------------------------------------------------------------

_Why = tuple[str, tuple[str, ...], str, float | None]


def _why(found: PerRank) -> _Why:
    """Return kind, first tensor, text and factor."""
    count, unit, units = len(found.forwards), found.unit, _plural(found)
    weights = fitted(found)
    layer = first_coupled(found, weights)
    if layer is not None:
        return (*_of_layer(found, layer), None)
    if weights is not None and max(weights) - min(weights) <= _LEGAL_FIT * max(map(abs, weights)):
        k = 1.0 / (count * weights[0])
        if abs(k - 1.0) > _LEGAL_FIT:
            text = (
                f"the loss is a sum over samples: the mean over {count} {units} that "
                f"{found.style} "
                f"takes is {k:.4g} x the reference"
            )
            return "factor", ("loss",), text, k
    elif weights is not None:
        return "mean_of_means", ("loss",), _denominators(found, weights), None
    elif found.draws:
        text = f"every {unit} draws its own random numbers for the loss: {found.draws[0]}"
        return "random_stream", ("loss",), text, None
    whose = "micro-batches" if found.pieces else "ranks' parts"
    text = f"the loss couples samples: no weights of the {whose} give that of the whole batch"
    return "cross_sample", ("loss",), text, None


def _plural(found: PerRank) -> str:
    """Return what the forwards are called together."""
    return "micro-batches" if found.pieces else "ranks"


def _of_layer(found: PerRank, name: str) -> tuple[str, tuple[str, ...], str]:
    """Return what a layer does whose outputs on the parts are not those on the whole batch."""
    path = _CALL.sub("", name).partition("[")[0]
    kind = found.classes.get(path, "")
    shown = f"{path} ({kind})" if kind else path
    statistics = "BatchNorm" in kind or _keeps_statistics(found, path)
    if statistics:
        own = "micro-batch" if found.pieces else "rank's part of the batch"
        text = f"{shown} normalises with the statistics of each {own}"
        return "batch_statistics", (name,), text
    if found.draws:
        shown += f"; {found.draws[0]}" if "Dropout" not in kind else ""
        text = (
            f"every {found.unit} draws its own random numbers, not its rows of the global draw: "
            f"{shown}"
        )
        return "random_stream", (name,), text
    sees = "is all that one forward sees" if found.pieces else "sees only its part of the batch"
    text = f"samples are coupled in {shown} or before it: each {found.unit} {sees}"
    return "cross_sample", (name,), text


def _keeps_statistics(found: PerRank, path: str) -> bool:
    """Say whether a module's own buffers differ between the parts and the whole batch."""
    prefix = "" if path == "model" else f"{path}."
    own = [
        name
        for name in found.reference.get("buffers", {})
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    ]
    return any(
        (value := record.get("buffers", {}).get(name)) is not None
        and value.is_floating_point()
        and not torch.allclose(
            value.double(), found.reference["buffers"][name].double(), rtol=_LEGAL, atol=0.0
        )
        for name in own
        for record in found.forwards
    )


def _denominators(found: PerRank, weights: Sequence[float]) -> str:
    """Say how much each part counts in the whole batch."""
    total = math.fsum(weights)
    ratios = [Fraction(weight / total).limit_denominator(4096) for weight in weights]
    common = math.lcm(*(ratio.denominator for ratio in ratios))
    counts = [int(ratio * common) for ratio in ratios]
    return (
        f"{found.style} averages per-{found.unit} means whose denominators are as "
        f"{' : '.join(map(str, counts))}: each {found.unit} counts 1/{len(counts)}, in the whole "
        f"batch "
        f"{', '.join(f'{count}/{sum(counts)}' for count in counts)}"
    )


def fitted(found: PerRank) -> list[float] | None:
    """Return the weights with which the parts' gradients give the whole batch's, if any do."""
    whole = {n: as_real(v).reshape(-1) for n, v in found.reference.get("gradients", {}).items()}
    if not whole:
        return None
    columns = []
    for record in found.forwards:
        own = record.get("gradients", {})
        columns.append(
            torch.cat(
                [
                    as_real(own[name]).reshape(-1) if name in own else torch.zeros_like(value)
                    for name, value in whole.items()
                ]
            )
        )
    matrix, target = torch.stack(columns, dim=1).double(), torch.cat(list(whole.values())).double()
    even = torch.full((len(columns), 1), 1.0 / len(columns), dtype=torch.float64)
    for weights in (even, even * len(columns)):
        if _leaves(matrix, weights, target) <= _LEGAL_FIT:
            return [float(weight) for weight in weights]
    solved = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution
    return [float(w) for w in solved] if _leaves(matrix, solved, target) <= _LEGAL_FIT else None


def _leaves(matrix: Tensor, weights: Tensor, target: Tensor) -> float:
    """Return what a combination of columns leaves of the target, relative to it."""
    size = float(target.norm())
    left = float(((matrix @ weights)[:, 0] - target).norm())
    return left / size if size else left


def first_coupled(found: PerRank, weights: Sequence[float] | None) -> str | None:
    """Return the first module output whose parts do not compose to the whole batch's.

    Values are compared without regard to their order, all calls of a module together: rows
    of a batch may lie anywhere in an output. A number composes as the mean, the sum or the
    weighted sum of the parts' numbers.
    """
    whole = _by_module(found.reference)
    parts = [_by_module(record) for record in found.forwards]
    for name, values in whole.items():
        if any(name not in part for part in parts):
            continue
        if not _composes(values, [part[name] for part in parts], weights):
            return name
    return None


def _by_module(record: StepRecord) -> dict[str, list[Tensor]]:
    """Return module outputs, all calls of one name together.

    Indices and counts say nothing: those of a packed sequence count the samples of the part.
    """
    found: dict[str, list[Tensor]] = {}
    for name, value in record.get("module_outputs", {}).items():
        if is_rounding(value):
            found.setdefault(_CALL.sub("", name), []).append(value)
    return found


def _composes(
    whole: list[Tensor], parts: list[list[Tensor]], weights: Sequence[float] | None
) -> bool:
    """Say whether the parts' values are together, or each, the whole's."""
    target, each = _values(whole), [_values(part) for part in parts]
    if all(part.numel() == target.numel() for part in each) and (
        all(_are_equal(part, target) for part in each)
    ):
        return True
    together = torch.cat(each).sort().values
    if together.numel() == target.numel():
        return _are_equal(together, target)
    if all(value.numel() == 1 for value in whole):
        numbers = [float(torch.stack([v.reshape(()).double() for v in part]).sum()) / len(part)
                   for part in parts]  # fmt: skip
        expected = float(target.mean())
        means = [math.fsum(numbers) / len(numbers), math.fsum(numbers)]
        if weights is not None:
            means.append(math.fsum(w * n for w, n in zip(weights, numbers, strict=True)))
        return any(abs(mean - expected) <= _LEGAL_FIT * abs(expected) for mean in means)
    # Outputs of other sizes, such as those of a router: nothing can be said.
    return all(part.numel() != target.numel() for part in each)


def _values(tensors: list[Tensor]) -> Tensor:
    """Return all values, sorted."""
    flat = [as_real(tensor.detach()).reshape(-1).double() for tensor in tensors]
    return torch.cat(flat).sort().values


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Say whether sorted values agree as float64 runs do."""
    return float((left - right).norm()) <= _LEGAL * max(float(right.norm()), 1e-300)
