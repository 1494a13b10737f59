"""Compare a drawn model under the engine's styles, in lock-step, with one device.

The step is captured once for all styles, and once more where its first call makes state.
After each step every rank's part of every value is compared with its part of what eager has:
result, parameters, buffers, optimizer state, gradients, hyper-parameters; the random
generator's state bitwise. What eager itself cannot determine - measured by runs with random
rounding - is not judged, but counted.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.drawn.model import DrawnModel, loaded
from spmd_verify.drawn.style import (
    STEPS,
    STYLES,
    Key,
    Passes,
    Placing,
    StyleRun,
    Subject,
    Values,
    copied,
    refusal,
)
from spmd_verify.errors import CaseError
from spmd_verify.layouts import region, take_region
from spmd_verify.noise.rounding import RandomRounding

# Relative to the value's largest element, or to SMALLEST where that is less: sums of terms
# of size one cancel to rounding, not to zero. Both are about 1e4 to 1e6 epsilons: wrong formulas
# are what is looked for.
TOLERANCES: Final = {"float64": 1e-10, "float32": 1e-3}
SMALLEST: Final = 1e-2
# Values that random rounding moves by more than this share of the tolerance are undetermined.
DETERMINED: Final = 0.02
# A model with a larger share of them does not count: RMSProp over gradients that cancel.
MOST_UNDETERMINED: Final = 0.1
NOISE_RUNS: Final = 2

# In the order in which a step computes them: the first difference is the cause.
KINDS: Final = (
    *("generator", "hyper", "result", "gradient", "buffer", "state", "parameter"),
)  # fmt: skip


class Undrawable(Exception):
    """Eager refuses the model, computes infinities, or rounding decides much of what it does."""


@dataclass(frozen=True)
class Finding:
    """How a style differs from one device.

    Attributes:
        style: The style.
        placing: Where it ran.
        kind: One of `KINDS`, `names` (something is missing or too much), `crash` or `refused`.
        step: The step.
        what: One line: the value and by how much, or the exception.
        detail: Values, or the traceback.
        place: For a crash, the file and function of the engine that raised.
    """

    style: str
    placing: Placing
    kind: str
    step: int
    what: str
    detail: str = ""
    place: str = ""

    @property
    def likeness(self) -> tuple[str, str, str]:
        """Return what findings of one fault mostly share."""
        return self.style, self.kind, self.place


class Differs(AssertionError):
    """A style computes something else than eager, or fails.

    Attributes:
        finding: What and where.
    """

    def __init__(self, message: str, finding: Finding) -> None:
        super().__init__(message)
        self.finding = finding

    @property
    def style(self) -> str:
        """The style."""
        return self.finding.style


class _Found(Exception):
    """A difference met while comparing.

    Attributes:
        finding: Without its style and mesh.
    """

    def __init__(self, kind: str, step: int, what: str, detail: str = "") -> None:
        super().__init__(what)
        self.finding = Finding("", Placing(), kind, step, what, detail)


@dataclass(frozen=True)
class Rules:
    """How a model is judged.

    Attributes:
        styles: Styles to run.
        dtype: A key of `TOLERANCES`.
        passes: Extra last pass of every style; how a fault is planted.
        allows_refusals: Count what the engine refuses instead of failing.
    """

    styles: tuple[str, ...] = STYLES
    dtype: str = "float64"
    passes: Passes | None = None
    allows_refusals: bool = False

    @property
    def tolerance(self) -> float:
        """The largest relative difference of values that are alike."""
        return TOLERANCES[self.dtype]


@dataclass
class Tally:
    """What a series of checks did.

    Attributes:
        models: Judged.
        cells: Model and style, judged.
        compared: Values.
        undetermined: Values that rounding decides.
        rejected: Models that are no test, by reason.
        refused: Cells that the engine refuses, by slug.
        fallbacks: Operators that were gathered and replicated.
    """

    models: int = 0
    cells: int = 0
    compared: int = 0
    undetermined: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


def check_drawn(
    drawn: DrawnModel, placing: Placing, tally: Tally | None = None, rules: Rules | None = None
) -> None:
    """Compare a drawn model under every style with eager.

    Args:
        drawn: The model.
        placing: The mesh and the expand mode's placements.
        tally: Counts are added to it.
        rules: How it is judged.

    Raises:
        Differs: With the model's source, the style, mesh and value that differs.
        Undrawable: Eager cannot run the model, or - all else agreed - determines too little.
    """
    rules, training = rules or Rules(), drawn.training
    tally = tally if tally is not None else Tally()
    with loaded(drawn, rules.dtype, STEPS + training.warm) as case:
        try:
            check(Subject(case, training.warm, training.is_scheduled), placing, tally, rules)
        except Differs as difference:
            message = (
                f"{difference}\nbatch {drawn.inputs.batch}: {placing}\n{drawn}\n\n"
                f"{drawn.to_source()}"
            )
            raise Differs(message, difference.finding) from difference


def check(subject: Subject, placing: Placing, tally: Tally, rules: Rules) -> None:
    """Compare a case under every style with eager; see `check_drawn`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, floors = _reference(subject)
        except (RuntimeError, ValueError, CaseError) as refused:
            raise Undrawable(f"eager refuses: {str(refused).splitlines()[0][:60]}") from refused
        captures = subject.captures()
        for style in filter(placing.forms, rules.styles):
            tally.cells += 1
            try:
                run = StyleRun(subject, style, placing, rules.passes, captures)
                _compare(run, expected, floors, tally, rules.tolerance)
            except Exception as failure:  # whatever the engine raises is a finding
                finding = replace(_finding(failure), style=style, placing=placing)
                if finding.kind == "refused" and rules.allows_refusals:
                    tally.refused[finding.place] += 1
                    tally.cells -= 1
                    continue
                message = f"{style} on {placing.text(style)}: {finding.what}\n{finding.detail}"
                raise Differs(message, finding) from failure
            tally.fallbacks.update(run.step.fallbacks)
    loud = [f > DETERMINED * rules.tolerance for step in floors for f in step.values()]
    if sum(loud) > MOST_UNDETERMINED * len(loud):
        raise Undrawable("rounding decides")
    tally.models += 1


def _finding(failure: Exception) -> Finding:
    """Return what an exception of the comparison or of the engine says."""
    if isinstance(failure, _Found):
        return failure.finding
    slug = refusal(failure)
    lines = str(failure).strip().splitlines() or [""]
    what = f"{type(failure).__name__}: {lines[0]}"
    if slug is not None:
        return Finding("", Placing(), "refused", 0, what, str(failure), slug)
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if "/spmd/" in frame.filename]
    place = f"{own[-1].filename.rpartition('/spmd/')[2]}:{own[-1].name}" if own else ""
    text = "".join(traceback.format_exception(failure)).rstrip()
    return Finding("", Placing(), "crash", 0, what, text, place)


# -- eager ---------------------------------------------------------------------------------


def _reference(subject: Subject) -> tuple[list[Values], list[dict[Key, float]]]:
    """Return what eager has after every step, and how far rounding alone moves it."""
    expected = list(_eager(subject))
    floors: list[dict[Key, float]] = [dict.fromkeys(step, 0.0) for step in expected]
    for seed in range(NOISE_RUNS):
        noisy = _eager(subject, RandomRounding(seed, subject.case.dtype))
        for plain, moved, floor in zip(expected, noisy, floors, strict=True):
            for key, value in plain.items():
                floor[key] = max(floor[key], distance(moved[key], value))
    for step in expected:
        for key, value in step.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"not finite: {key[0]}")
    return expected, floors


def _eager(subject: Subject, noise: Any = None) -> Iterator[Values]:
    model, optimizer = subject.build()
    case = subject.case
    for index in range(STEPS):
        batch = case.batch(index)
        case.seed_step(index)
        if noise is None:
            result = case.step(model, optimizer, batch)
        else:
            with noise:
                result = case.step(model, optimizer, batch)
        yield copied(model, optimizer, result)


# -- comparison ----------------------------------------------------------------------------


def _compare(
    run: StyleRun, expected: list[Values], floors: list[dict[Key, float]], tally: Tally,
    tolerance: float,
) -> None:  # fmt: skip
    """Compare every step of a run with eager's; raise `_Found` at the first difference."""
    for index, (values, parts) in enumerate(run):
        wanted = dict(sorted(expected[index].items(), key=lambda item: KINDS.index(item[0][0])))
        if set(values) != set(wanted):
            missing, more = sorted(set(wanted) - set(values)), sorted(set(values) - set(wanted))
            raise _Found("names", index, f"step {index}: missing {missing}, unexpected {more}")
        if not torch.equal(values["generator", ""], wanted["generator", ""]):
            what = f"step {index}: the random generator is left in another state"
            raise _Found("generator", index, what)
        for key, value in wanted.items():
            if floors[index][key] > DETERMINED * tolerance:
                tally.undetermined += 1
                continue
            tally.compared += 1
            what = f"step {index}: {key[0]} {key[1]}"
            held = [] if key[0] in ("result", "generator") else [(what, values[key], value)]
            if key in parts:
                held += _held_parts(what, run, parts[key], value)
            for where, actual, own in held:
                found = distance(actual.detach(), own, value)
                if not found <= tolerance:
                    text = f"actual   {actual.tolist()}\nexpected {own.tolist()}"
                    raise _Found(
                        key[0], index, f"{where} differs by {found:.1e} of its scale", text
                    )


def _held_parts(
    what: str, run: StyleRun, placed: Any, value: Tensor
) -> list[tuple[str, Tensor, Tensor]]:
    """Return name, actual and expected of every rank's part of a value."""
    found = []
    for rank, coordinate in enumerate(run.coordinates):
        part = region(value.shape, placed.layout, run.mesh_shape, coordinate)
        own = take_region(value, part) if value.ndim else value
        found.append((f"{what} of rank {rank}", torch.as_tensor(placed.local[rank]), own))
    return found


def distance(actual: Tensor, wanted: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest difference relative to the largest element of the whole value."""
    if actual.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point() or torch.equal(actual, wanted):
        return 0.0 if torch.equal(actual.to(wanted.dtype), wanted) else float("inf")
    scale = (wanted if whole is None else whole).abs().max().item()
    found = (actual.to(wanted.dtype) - wanted).abs().max().item()
    return found / max(scale, SMALLEST) if found == found else float("inf")
