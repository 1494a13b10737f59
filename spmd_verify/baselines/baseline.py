"""The accepted state of cells, small enough for git: verdicts, ratios, fingerprints. Torch-free.

No loss and no value of a tensor stands in it: those drift with every release of torch. Cells are
kept by environment, since another torch minor, backend or instruction set rounds otherwise.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

import msgspec

from spmd_verify.errors import RecordError
from spmd_verify.exit_codes import fails
from spmd_verify.gate import Waiver, full_name, suffix_of, waiver_from
from spmd_verify.plain_structs import from_plain, to_plain
from spmd_verify.record import Cell, Record
from spmd_verify.verdict import LIMITS
from spmd_verify.visible import visible
from spmd_verify.whole_file import write_whole

# 1: first version.
BASELINE_VERSION: Final = 1
KNOWN: Final = "known failure"
# Ratios are kept where they are above this share of the limit c; a page of them at most.
_NEAR: Final = 0.5
_MOST_NEAR: Final = 20
_WHOLE: Final = re.compile(r"[0-9]{1,6}")


class State(msgspec.Struct, kw_only=True):
    """What is kept of one cell.

    Attributes:
        verdict: The cell's.
        fails: Whether it made its run fail, or would without a waiver.
        cause: Kind of its cause, where it has one.
        first: Step, stage and tensor of the first divergence.
        ratio: The worst error / noise, three digits.
        worst: Stage and tensor of that.
        near: Ratios by stage and tensor, the largest over the steps, where they are above half
            of the limit.
        layouts: How many rows have which layout.
        layout_digest: Of every row's layout.
        collectives: How many of each kind.
    """

    verdict: str
    fails: bool = False
    cause: str | None = None
    first: str | None = None
    ratio: float | None = None
    worst: str | None = None
    near: dict[str, float] = {}
    layouts: dict[str, int] = {}
    layout_digest: str = ""
    collectives: dict[str, int] = {}
    unknown: dict[str, Any] = {}


class Baseline(msgspec.Struct, kw_only=True):
    """A baseline file.

    Attributes:
        baseline_version: Major version of the format.
        tool: What wrote it.
        environments: States by environment and full cell name.
        known_failures: `{cell, reason, until}` and optionally `verdict` and `kind`.
    """

    baseline_version: int = BASELINE_VERSION
    tool: str = ""
    environments: dict[str, dict[str, State]] = {}
    known_failures: list[dict[str, Any]] = []
    unknown: dict[str, Any] = {}

    def waivers(self, where: str) -> tuple[Waiver, ...]:
        """Return the known failures.

        Raises:
            UsageError: `bad-waiver`, `unknown-setting`.
        """
        return tuple(
            waiver_from(plain, f"{where}, known failure {n}", what=KNOWN, cells_key="cell")
            for n, plain in enumerate(self.known_failures, 1)
        )


def environment_of(record: Record) -> str:
    """Return what a record's numbers depend on: `torch 2.13, gloo, x86_64 AVX512`."""
    told = {key: str(value) for key, value in record.environment.items()}
    minor = ".".join(told.get("torch", "unknown").split("+")[0].split(".")[:2])
    isa = f"{told.get('machine', 'unknown')} {told.get('cpu_capability', '')}".strip()
    return visible(f"torch {minor}, {told.get('backend', 'gloo')}, {isa}")


def states(record: Record) -> dict[str, State]:
    """Return what is kept of every cell of a record, by full name."""
    strict = bool(record.settings.get("strict"))
    suffix = suffix_of(record.settings)
    return {full_name(cell, suffix): _state(cell, strict=strict) for cell in record.cells}


def _state(cell: Cell, *, strict: bool) -> State:
    """Return what is kept of one cell."""
    first, worst = cell.first_divergence, cell.worst
    is_waived = cell.gate is not None and cell.gate.waived is not None
    lies = {f"{row.stage} {row.name}": row.layout for row in cell.tensors}
    digest = hashlib.sha256(json.dumps(sorted(lies.items())).encode()).hexdigest()[:16]
    return State(
        verdict=cell.verdict,
        fails=is_waived or cell.verdict == "error" or fails(cell, strict=strict),
        cause=cell.cause.kind if cell.cause is not None else None,
        first=f"step {first.step}, {first.stage}, {first.tensor}" if first is not None else None,
        ratio=_digits(worst.ratio) if worst is not None else None,
        worst=f"{worst.stage} {worst.tensor}" if worst is not None else None,
        near=_near(cell),
        layouts=dict(sorted(Counter(row.layout for row in cell.tensors).items())),
        layout_digest=digest if lies else "",
        collectives=dict(sorted(cell.collectives.items())),
    )


def _near(cell: Cell) -> dict[str, float]:
    """Return the ratios near or above the limit, the largest ones."""
    least = _NEAR * LIMITS.get((cell.dtype, "tensor"), math.inf)
    found: dict[str, float] = {}
    for row in cell.tensors:
        if row.ratio is not None and row.verdict != "exact" and row.ratio > least:
            name = f"{row.stage} {row.name}"
            found[name] = max(_digits(row.ratio), found.get(name, 0.0))
    largest = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST_NEAR]
    return dict(sorted(largest))


def _digits(value: float) -> float:
    """Return a number with three digits."""
    return float(f"{value:.3g}")


def read(path: str) -> Baseline:
    """Read a baseline.

    Raises:
        RecordError: `baseline-unreadable`, `not-a-baseline`, `baseline-too-new`.
        UsageError: As `Baseline.waivers`.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RecordError(
            f"Cannot read the baseline: {path}. Got {error.strerror}. Make one: spmd-verify "
            f"MODEL.py --report json=record.json, then spmd-verify baseline save record.json "
            f"{path}",
            slug="baseline-unreadable",
        ) from error
    return decode(content, path)


def decode(content: bytes, where: str) -> Baseline:
    """Read a baseline's JSON; raises as `read`."""
    try:
        plain = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_a_baseline(where, str(error)) from error
    if not isinstance(plain, dict) or "baseline_version" not in plain:
        is_record = isinstance(plain, dict) and "schema_version" in plain
        raise _not_a_baseline(where, "a record" if is_record else "no baseline_version")
    version = str(plain["baseline_version"])
    if _WHOLE.fullmatch(version) is None:
        raise _not_a_baseline(where, f"baseline_version {version[:40]!r}")
    if int(version) > BASELINE_VERSION:
        raise RecordError(
            f"The baseline is too new: {where}. Got version {version}, this spmd-verify reads up "
            f"to {BASELINE_VERSION}. Install the one that wrote it, or a newer one",
            slug="baseline-too-new",
        )
    try:
        found: Baseline = from_plain(Baseline, plain)
    except (msgspec.ValidationError, TypeError) as error:
        raise _not_a_baseline(where, str(error)) from error
    found.waivers(where)
    return found


def encode(baseline: Baseline) -> bytes:
    """Return a baseline as JSON in a stable order, for small differences in git."""
    plain: dict[str, Any] = to_plain(baseline)
    plain["environments"] = {
        name: {cell: _said(state) for cell, state in sorted(cells.items())}
        for name, cells in sorted(plain["environments"].items())
    }
    return (json.dumps(plain, indent=1, ensure_ascii=True) + "\n").encode()


def _said(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without what is nothing; reading puts it back."""
    nothing = (None, False)
    return {
        key: value
        for key, value in state.items()
        if not any(value is one for one in nothing) and value not in ("", {})
    }


def write(baseline: Baseline, path: str) -> None:
    """Write a baseline whole or not at all.

    Raises:
        UsageError: `report-not-written`.
    """
    write_whole(path, encode(baseline))


def known_failure(name: str, state: State, reason: str, until: date) -> Mapping[str, Any]:
    """Return the entry that lets one cell fail as it does, and no other way."""
    entry = {"cell": name, "reason": reason, "until": until.isoformat(), "verdict": state.verdict}
    return {**entry, "kind": state.cause} if state.cause is not None else entry


def _not_a_baseline(where: str, why: str) -> RecordError:
    return RecordError(
        f"Not a baseline of spmd-verify: {where}. Got {why}. Pass the file that spmd-verify "
        f"baseline save wrote; nothing was changed",
        slug="not-a-baseline",
    )
