"""One cell of a record as the HTML report shows it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spmd_verify.exit_codes import FAILING, fails
from spmd_verify.planting import certificate as certificates
from spmd_verify.planting.certificate import (
    CAUGHT,
    EQUIVALENT,
    NOT_PLANTED,
    SURVIVED,
    Certificate,
)
from spmd_verify.record import Cause, Cell, Row
from spmd_verify.reporters.html_text import counted, link, number
from spmd_verify.reporters.paragraphs import first_row, ranges, waiver
from spmd_verify.verdict import Verdict

_NOT_JUDGED: Final = ("error", "unsupported")
# Order of the tally, and how each verdict looks besides its colour.
GLYPHS: Final = {
    "mismatch": "\u2717",
    "semantic": "\u2260",
    "error": "!",
    "not_exercised": "\u2205",
    "undetermined": "?",
    "rounding": "\u2248",
    "exact": "=",
    "unsupported": "\u2013",
}
_MOST_SENSITIVITIES: Final = 20


@dataclass(frozen=True)
class CellView:
    """One cell.

    Attributes:
        cell: Of the record.
        key: The element's id, `cell=case/style/mesh/dtype`; unique on the page.
        is_failing: It counts as failed.
        row: The row of the first divergence.
        share: The worst error as a share of the allowed one; None where nothing says it.
        worst: `(row, share)` of the tensors nearest to or farthest beyond their limit, a tensor
            and stage once.
        certificate: What planted faults said, if any were planted.
    """

    cell: Cell
    key: str
    is_failing: bool
    row: Row | None
    share: float | None
    worst: list[tuple[Row, float | None]]
    certificate: Certificate | None

    @property
    def href(self) -> str:
        """Return the link to this cell."""
        return link(self.key)

    @property
    def glyph(self) -> str:
        """Return the verdict's sign."""
        return GLYPHS.get(self.cell.verdict, "?")

    @property
    def is_judged(self) -> bool:
        """Say whether there is a verdict about numbers."""
        return self.cell.verdict not in _NOT_JUDGED

    @property
    def is_waived(self) -> bool:
        """Say whether the cell would fail by its verdict and the run let it pass."""
        return bool(self.waiver) or (self.cell.verdict in FAILING and not self.is_failing)

    @property
    def waiver(self) -> str:
        """Return why it may fail, and how long; empty where no waiver holds."""
        return waiver(self.cell)

    @property
    def cause(self) -> Cause | None:
        """Return why it fails."""
        return (self.row.cause if self.row else None) or self.cell.cause

    @property
    def residual(self) -> float | None:
        """Return what the cause leaves, in multiples of the noise; None where it is no fit."""
        found = None if self.cause is None else self.cause.residual
        return found if found is not None and math.isfinite(found) else None

    @property
    def reason(self) -> list[str]:
        """Return the lines of what the cell says besides numbers."""
        cell = self.cell
        return (cell.reason).splitlines()

    @property
    def could_not_run(self) -> list[str]:
        """Return what could not be run where nothing explains the cell."""
        return [str(what) for what in self.cell.unknown.get("not_run", ())]

    @property
    def growth(self) -> list[float]:
        """Return the largest parameter error / noise per step."""
        found: list[float] = self.cell.unknown.get("growth", [])
        return found

    @property
    def evidence(self) -> str:
        """Return by how much the first divergence differs, and on which ranks."""
        row = self.row
        if row is None:
            return ""
        told = f"{number(row.ratio)} \u00d7 the noise"
        if row.ratio is None:
            told = "no noise floor"
        elif not row.noise and (differing := row.unknown.get("differing")):
            told = f"{differing} of {math.prod(row.shape)} elements differ where no bit may"
        return told + (f", on ranks {ranges(row.ranks)}" if row.ranks else "")

    @property
    def downstream(self) -> int:
        """Count the rows that only follow from the first divergence."""
        return sum(1 for row in self.cell.tensors if row.downstream_of)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return what else the record says of the cell."""
        cell = self.cell
        exercised = cell.exercised
        probe = cell.unknown.get("probe", {}).get("verdict", "")
        resumed = "; ".join(
            f"{found.get('way')} on {found.get('mesh')}: {found.get('verdict')}"
            + (f" ({found['reason']})" if found.get("reason") else "")
            for found in cell.unknown.get("resume", ())
        )
        ties = "; ".join(
            f"{tie.operator} at {tie.source}, step {tie.step}: margin {number(tie.margin)}, noise "
            f"{number(tie.noise)}"
            for tie in cell.ties
        )
        told = (
            ("tensors", counted(cell.counts)),
            ("exercised", f"{exercised.n} of {exercised.of}" if exercised else ""),
            ("ranks", f"{cell.world_size}, {cell.runner}"),
            ("collectives", counted(cell.collectives)),
            ("fallbacks", counted(cell.fallbacks)),
            ("SGD probe", str(probe)),
            ("resumed", resumed),
            ("near ties", ties),
            ("seconds", f"{cell.duration_seconds:.1f}" if cell.duration_seconds else ""),
            ("log", cell.log or ""),
        )
        return [(name, value) for name, value in told if value]


@dataclass(frozen=True)
class CertificateView:
    """The certificate of one cell.

    Attributes:
        view: The cell.
        found: The certificate.
        sensitivities: The tensors in which the largest errors stay unseen, worst first.
        left_out: How many more there are.
    """

    view: CellView
    found: Certificate
    sensitivities: list[certificates.Sensitivity]
    left_out: int

    @property
    def caught(self) -> int:
        """Count the faults caught."""
        return self.found.count(CAUGHT)

    @property
    def equivalent(self) -> int:
        """Count the faults that change no number."""
        return self.found.count(EQUIVALENT)

    @property
    def open(self) -> list[certificates.Outcome]:
        """Return the faults that survived or could not be planted."""
        return [o for o in self.found.outcomes if o.status in (SURVIVED, NOT_PLANTED)]


def seen(
    cell: Cell, taken: set[str], limits: dict[str, float], most: int, *, strict: bool
) -> CellView:
    """Return a cell as it is shown.

    Args:
        cell: Of the record.
        taken: Keys of the cells before it; its own is added.
        limits: Allowed multiples of the noise, by `dtype/norm`.
        most: Length of its table of worst tensors.
        strict: Whether `--strict` decides what fails.
    """
    return CellView(
        cell=cell,
        key=_key(cell, taken),
        is_failing=fails(cell, strict=strict),
        row=first_row(cell),
        share=_worst_share(cell, limits),
        worst=_worst(cell.tensors, limits, most),
        certificate=certificates.of(cell),
    )


def certified(view: CellView, found: Certificate) -> CertificateView:
    """Return a certificate as it is shown."""
    entries = sorted(
        found.sensitivities,
        key=lambda entry: -1.0 if entry.relative is None else entry.relative,
        reverse=True,
    )
    shown = entries[:_MOST_SENSITIVITIES]
    return CertificateView(view, found, shown, len(entries) - len(shown))


def _key(cell: Cell, taken: set[str]) -> str:
    """Return the id of a cell, without white space as HTML wants it; a repeated one is numbered."""
    name = "".join(
        "_" if char.isspace() or not char.isprintable() else char
        for char in f"cell={cell.case}/{cell.style}/{cell.mesh}/{cell.dtype}"
    )
    key, number_ = name, 1
    while key in taken:
        number_ += 1
        key = f"{name}~{number_}"
    taken.add(key)
    return key


def _limit(row: Row, limits: dict[str, float]) -> float | None:
    """Return the multiple of the noise that is allowed for a row; None where nobody says."""
    return limits.get(f"{row.dtype}/{'row' if 'row' in row.unknown else 'tensor'}")


def _share(row: Row, limits: dict[str, float]) -> float | None:
    """Return a row's error as a share of the allowed one."""
    limit = _limit(row, limits)
    return None if row.ratio is None or limit is None else row.ratio / limit


def _worst_share(cell: Cell, limits: dict[str, float]) -> float | None:
    """Return the worst row's error as a share of the allowed one."""
    limit = limits.get(f"{cell.dtype}/tensor")
    return None if cell.worst is None or limit is None else cell.worst.ratio / limit


def _worst(
    rows: Sequence[Row], limits: dict[str, float], most: int
) -> list[tuple[Row, float | None]]:
    """Return the rows with the largest share of their limit, a tensor and stage once."""
    order: dict[str, int] = {Verdict.MISMATCH: 2, Verdict.SEMANTIC: 1}

    def weight(row: Row) -> tuple[int, bool, float]:
        # What only follows from another difference is no evidence of its own.
        share = _share(row, limits)
        size = math.inf if share is not None and math.isnan(share) else share or 0.0
        return order.get(row.verdict, 0), row.downstream_of is None, size

    found: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=weight, reverse=True):
        found.setdefault((row.stage, row.name), row)
    return [(row, _share(row, limits)) for row in list(found.values())[:most]]
