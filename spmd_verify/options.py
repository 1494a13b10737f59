"""What one `run` was asked to do, with configuration, environment and flags resolved.

Torch-free. The command line makes an `Options`; `spmd_verify.run.verify` obeys it.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from spmd_verify.errors import UsageError, choices_text
from spmd_verify.gate import GateRules, check_fail_on, suffix_of
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.streams import COLORS
from spmd_verify.variants import Variants
from spmd_verify.verdict import LIMITS

DTYPES: Final[tuple[str, ...]] = ("float32", "float64", "bfloat16")
# Dtypes in which a wrong formula is far above rounding (`drawn.check.TOLERANCES`).
FUZZ_DTYPES: Final[tuple[str, ...]] = ("float64", "float32")
# What `--format` puts on stdout.
OUTPUT_FORMATS: Final[tuple[str, ...]] = ("text", "json", "github")
RUNNERS: Final[tuple[str, ...]] = ("processes", "lockstep")
PP_SCHEDULES: Final = ("gpipe", "1f1b")
# One machine runs 16 gloo ranks before scheduling dominates; lockstep
# walked 1,024 ranks in 0.3 s a step, four times that is the limit.
MAX_RANKS: Final[dict[str, int]] = {"processes": 16, "lockstep": 4096}
DEFAULT_MESH: Final = MeshSpec(((None, 2),))
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
DEFAULT_FAULTS: Final = 24


@dataclass(frozen=True)
class Options:
    """Settings of one run; every field is resolved and checked by `checked`.

    Attributes:
        targets: Addresses, as typed.
        styles: Style patterns, as typed; empty means `engine` and the file's own styles.
            Resolve with `style_ids.select(options.styles, case.user_styles)`.
        mesh: The mesh of every style that does not bring its own.
        mesh_sweep: Meshes to run one after the other instead of `mesh`.
        dtype: The case's dtype, one of `DTYPES`.
        steps: Training steps per run, >= 1.
        seed: The base seed, >= 0.
        timeout_seconds: Per cell.
        runner: One of `RUNNERS`.
        max_ranks: A larger mesh is refused before anything runs.
        no_cache: Neither use nor keep references of other runs.
        match: Glob over cell ids `case/style`; None selects all (`-k`).
        stop_at_first: Stop after the first cell that fails (`-x`).
        strict: `undetermined` and `not_exercised` rows fail too.
        fail_on: Verdicts that fail a cell; empty for those of the exit-code table.
        gate: Overrides and waivers; `rules` has the two above too.
        baseline: Baseline to compare with after the run; empty for none.
        resume: Record whose cells are not run again; empty for none.
        budget: After so many seconds no further cell begins; None for no end.
        probe: Whether a plain SGD step is judged beside the case's optimizer; None: under
            styles that train real modules.
        exit_zero: Exit 0 where the table says 1.
        explain: Print how the case was discovered.
        list_only: Print what would run, run nothing.
        verbosity: -1 quiet, 0 normal, 1 lists tensors, 2 adds the exact ones.
        log_dir: Where rank logs go; None for a temporary folder.
        reports: `(format, path)` of every report file asked for.
        output_format: What goes to stdout, one of `OUTPUT_FORMATS`.
        color: One of `streams.COLORS`.
        exact: Judge single steps from dyadic states, bit for bit.
        overrides: Fields put over what discovery finds, by name; part of a case's address.
        pp_schedule: In which order pipeline stages run micro-batches, one of `PP_SCHEDULES`.
        variants: How every case is trained besides: docs/variants.md.
        resume_check: Whether each cell that passes is saved, loaded into a fresh build, and
            continued.
        faults: Most faults that `certify` plants in a cell, >= 1.
        command: The command line, for the record.
    """

    targets: tuple[str, ...]
    styles: tuple[str, ...] = ()
    mesh: MeshSpec = DEFAULT_MESH
    mesh_sweep: tuple[MeshSpec, ...] = ()
    dtype: str = "float32"
    steps: int = 3
    seed: int = 0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    runner: str = "processes"
    max_ranks: int | None = None
    no_cache: bool = False
    match: str | None = None
    stop_at_first: bool = False
    strict: bool = False
    fail_on: tuple[str, ...] = ()
    gate: GateRules = field(default_factory=GateRules)
    baseline: str = ""
    resume: str = ""
    budget: float | None = None
    probe: bool | None = None
    exit_zero: bool = False
    explain: bool = False
    list_only: bool = False
    verbosity: int = 0
    log_dir: str | None = None
    reports: tuple[tuple[str, str], ...] = ()
    output_format: str = OUTPUT_FORMATS[0]
    color: str = COLORS[0]
    exact: bool = False
    overrides: dict[str, str] = field(default_factory=dict)
    pp_schedule: str = PP_SCHEDULES[0]
    variants: Variants = field(default_factory=Variants)
    resume_check: bool = False
    faults: int = DEFAULT_FAULTS
    command: tuple[str, ...] = ()

    @property
    def meshes(self) -> tuple[MeshSpec, ...]:
        """Return the meshes to run, in order."""
        return self.mesh_sweep or (self.mesh,)

    @property
    def case_overrides(self) -> dict[str, str]:
        """Return what `case.load_case` takes as overrides."""
        exact = {"exact": "yes"} if self.exact else {}
        is_usual = self.pp_schedule == PP_SCHEDULES[0]
        schedule = {} if is_usual else {"schedule": self.pp_schedule}
        return {**self.overrides, **exact, **schedule, **self.variants.overrides()}

    @property
    def rank_limit(self) -> int:
        """Return the largest world size allowed."""
        return MAX_RANKS[self.runner] if self.max_ranks is None else self.max_ranks

    @property
    def settings(self) -> dict[str, object]:
        """Return the options as the record keeps them, with the limits c."""
        return {
            "styles": list(self.styles),
            "mesh": [[[name, size] for name, size in mesh.axes] for mesh in self.meshes],
            "dtype": self.dtype,
            "steps": self.steps,
            "seed": self.seed,
            "timeout_seconds": self.timeout_seconds,
            "runner": self.runner,
            "strict": self.strict,
            "fail_on": list(self.fail_on or self.gate.fail_on),
            "probe": self.probe,
            "resume_check": self.resume_check,
            "overrides": self.case_overrides,
            "limits": {f"{dtype}/{norm}": c for (dtype, norm), c in LIMITS.items()},
        }

    @property
    def rules(self) -> GateRules:
        """Return what decides whether a cell fails, with this run's verdicts and names."""
        return replace(
            self.gate,
            fail_on=self.fail_on or self.gate.fail_on,
            strict=self.strict,
            suffix=suffix_of(self.settings),
        )

    def checked(self) -> "Options":
        """Return self if every value is in range.

        Raises:
            UsageError: `unknown-dtype`, `unknown-runner`, `unknown-schedule`, `bad-number`,
                `mesh-too-large`, `unknown-report-format`, `unknown-format`, `unknown-color`,
                `two-kinds-of-inputs`, `exact-variants`, `nothing-to-lower`, `two-precisions`,
                `unknown-verdict`.
        """
        if self.exact and (self.variants.overrides() or self.resume_check):
            raise UsageError(
                "Cannot run both: --exact and a variant. Exact mode has a step, an optimizer and "
                "values of its own. Run one after the other",
                slug="exact-variants",
            )
        if self.exact and "inputs" in self.overrides:
            raise UsageError(
                "Cannot run both: --exact and --adversarial. Each brings inputs and initial values "
                "of its own. Run one after the other",
                slug="two-kinds-of-inputs",
            )
        _check_choice("--dtype", self.dtype, DTYPES, slug="unknown-dtype")
        self.variants.checked(self.dtype)
        _check_choice("--runner", self.runner, RUNNERS, slug="unknown-runner")
        _check_choice("--pp-schedule", self.pp_schedule, PP_SCHEDULES, slug="unknown-schedule")
        check_shown(self.reports, self.output_format, self.color)
        _check_number("--steps", self.steps, 2 if self.resume_check else 1)
        _check_number("--seed", self.seed, 0)
        _check_number("--faults", self.faults, 1)
        _check_number("--max-ranks", self.rank_limit, 1)
        if not self.timeout_seconds > 0:
            raise _out_of_range("--timeout", self.timeout_seconds, "more than 0 seconds")
        if self.budget is not None and not self.budget > 0:
            raise _out_of_range("--budget", self.budget, "more than 0 seconds")
        for mesh in self.meshes:
            check_rank_limit(mesh.num_ranks, self.rank_limit, self.runner)
        check_fail_on(self.fail_on, "--fail-on")
        return self


@dataclass(frozen=True)
class FuzzOptions:
    """Settings of `fuzz`; checked by `checked`.

    Attributes:
        seconds: How long models are drawn.
        seed: Of the draws, >= 0.
        max_ranks: The largest mesh.
        output: Folder of the files of failing models.
        dtype: One of `FUZZ_DTYPES`.
    """

    seconds: float = 60.0
    seed: int = 0
    max_ranks: int = 8
    output: str = "."
    dtype: str = "float64"

    def checked(self) -> "FuzzOptions":
        """Return self if every value is in range.

        Raises:
            UsageError: `unknown-dtype`, `bad-number`, `no-such-folder`.
        """
        _check_choice("--dtype", self.dtype, FUZZ_DTYPES, slug="unknown-dtype")
        if not 0 < self.seconds < math.inf:
            raise _out_of_range("--seconds", self.seconds, "more than 0")
        _check_number("--seed", self.seed, 0)
        _check_number("--max-ranks", self.max_ranks, 1)
        if not (os.path.isdir(self.output) and os.access(self.output, os.W_OK)):
            raise UsageError(
                f"Cannot write to the folder: --output {self.output!r}. Name a folder that exists "
                f"and can be written",
                slug="no-such-folder",
            )
        return self


def check_shown(reports: Iterable[tuple[str, str]], output_format: str, color: str) -> None:
    """Check what a run or a record is to be shown as.

    Args:
        reports: `(format, path)` of the report files.
        output_format: For stdout.
        color: One of `streams.COLORS`.

    Raises:
        UsageError: `unknown-report-format`, `unknown-format`, `unknown-color`.
    """
    from spmd_verify.reporters import FORMATS  # the record and its views, not for --help

    for report_format, _ in reports:
        _check_choice("--report", report_format, (*FORMATS,), slug="unknown-report-format")
    _check_choice("--format", output_format, OUTPUT_FORMATS, slug="unknown-format")
    _check_choice("--color", color, COLORS, slug="unknown-color")


def check_rank_limit(num_ranks: int, limit: int, runner: str) -> None:
    """Refuse a mesh that is larger than allowed.

    Raises:
        UsageError: `mesh-too-large`.
    """
    if num_ranks > limit:
        remedy = (
            "Use a smaller mesh, raise --max-ranks, or use --runner lockstep, which needs no "
            "processes"
            if runner == "processes"
            else "Use a smaller mesh or raise --max-ranks"
        )
        raise UsageError(
            f"The mesh is too large: {num_ranks} ranks. Expected at most {limit} with --runner "
            f"{runner}. {remedy}",
            slug="mesh-too-large",
        )


def _check_choice(flag: str, value: str, choices: tuple[str, ...], *, slug: str) -> None:
    if value not in choices:
        raise UsageError(
            f"Unknown value: {flag} {value!r}; {choices_text(value, choices)}", slug=slug
        )


def _check_number(flag: str, value: float, least: int) -> None:
    if value < least:
        raise _out_of_range(flag, value, f"at least {least}")


def _out_of_range(flag: str, value: float, expected: str) -> UsageError:
    return UsageError(
        f"Number out of range: {flag} {value!r}. Expected {expected}", slug="bad-number"
    )
