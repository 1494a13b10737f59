"""What the HTML report says of a record before any script runs: a view for the template.

Torch-free. Nothing here is judged anew: verdicts, causes and limits are the record's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from spmd_verify import certificate as certificates
from spmd_verify.certificate import CAUGHT, EQUIVALENT, NOT_PLANTED, SURVIVED, Certificate
from spmd_verify.exit_codes import fails
from spmd_verify.record import Cause, Cell, Record, Row
from spmd_verify.reporters.html_text import counted, link, number, ranges
from spmd_verify.reporters.terminal import first_row
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
# Rows of all tables that need no script, together; each cell has at least three.
_STATIC_ROWS: Final = 400
_MOST_ROWS: Final = 10
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
    def cause(self) -> Cause | None:
        """Return why it fails."""
        return (self.row.cause if self.row else None) or self.cell.cause

    @property
    def reason(self) -> list[str]:
        """Return the lines of what the cell says besides numbers."""
        cell = self.cell
        return (cell.skipped_reason or cell.undetermined_reason or cell.message).splitlines()

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
class Matrix:
    """Styles by meshes of one case.

    Attributes:
        case: Its address.
        columns: Headings.
        lines: A style, and under every heading its cells.
        is_by_ranks: Columns are numbers of ranks, because styles have meshes of their own.
        condition: Under which condition cells of the case fail, if a sweep found one.
    """

    case: str
    columns: list[str]
    lines: list[tuple[str, list[list[CellView]]]]
    is_by_ranks: bool
    condition: str | None


@dataclass(frozen=True)
class CertificateView:
    """The certificate of one cell.

    Attributes:
        view: The cell.
        found: The certificate.
        open: Faults that survived or could not be planted.
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


class Overview:
    """The whole page.

    Attributes:
        record: What it is a view of.
        cells: All cells, in the record's order.
    """

    def __init__(self, record: Record) -> None:
        """Read the cells of a record."""
        self.record = record
        strict = bool(record.settings.get("strict"))
        limits = record.settings.get("limits", {})
        most = max(3, min(_MOST_ROWS, _STATIC_ROWS // max(len(record.cells), 1)))
        taken: set[str] = set()
        self.cells = [
            CellView(
                cell=cell,
                key=_key(cell, taken),
                is_failing=fails(cell, strict=strict),
                row=first_row(cell),
                share=_worst_share(cell, limits),
                worst=_worst(cell.tensors, limits, most),
                certificate=certificates.of(cell),
            )
            for cell in record.cells
        ]

    @property
    def judged(self) -> list[CellView]:
        """Return the cells with a verdict about numbers."""
        return [view for view in self.cells if view.is_judged]

    @property
    def failing(self) -> list[CellView]:
        """Return the cells that fail, in the record's order."""
        return [view for view in self.cells if view.is_failing]

    @property
    def errors(self) -> list[CellView]:
        """Return the cells whose ranks died, hung or raised."""
        return [view for view in self.cells if view.cell.verdict == "error"]

    @property
    def unsupported(self) -> list[CellView]:
        """Return the cells whose style refuses the case."""
        return [view for view in self.cells if view.cell.verdict == "unsupported"]

    @property
    def open(self) -> list[CellView]:
        """Return the cells that neither fail nor pass: rounding or a tie decides them."""
        return [
            view
            for view in self.judged
            if not view.is_failing and (view.cell.verdict == "undetermined" or view.cell.ties)
        ]

    @property
    def state(self) -> str:
        """Return the class of the headline: `mismatch`, `error`, `unsupported` or `exact`."""
        if self.failing:
            return "mismatch"
        if self.errors:
            return "error"
        return "exact" if self.judged else "unsupported"

    @property
    def headline(self) -> str:
        """Return what a reader must know, in one sentence."""
        judged, failing = len(self.judged), len(self.failing)
        if not self.cells:
            return "The record holds no cells"
        if failing:
            return f"{failing} of {judged} cells {'fails' if failing == 1 else 'fail'}"
        if self.errors:
            return f"No verdict for {_cells(len(self.errors))}: ranks raised, died or hung"
        if not judged:
            return f"Nothing was judged: {_cells(len(self.cells))}, all unsupported"
        return f"All {judged} cells pass" if judged > 1 else "The one cell passes"

    @property
    def closest(self) -> CellView | None:
        """Return the passing cell with the least head-room."""
        passing = [v for v in self.judged if not v.is_failing and v.share is not None]
        return max(passing, key=lambda view: view.share or 0.0, default=None)

    @property
    def tally(self) -> list[tuple[str, str, int]]:
        """Return verdict, sign and number of cells."""
        counts = {word: sum(v.cell.verdict == word for v in self.cells) for word in GLYPHS}
        return [(word, GLYPHS[word], count) for word, count in counts.items() if count]

    @property
    def matrices(self) -> list[Matrix]:
        """Return a matrix per case."""
        conditions = self.record.unknown.get("conditions", {})
        cases = dict.fromkeys(view.cell.case for view in self.cells)
        return [
            _matrix(case, [v for v in self.cells if v.cell.case == case], conditions.get(case))
            for case in cases
        ]

    @property
    def certified(self) -> list[CertificateView]:
        """Return the cells with a certificate."""
        found = []
        for view in self.cells:
            if view.certificate is not None:
                entries = sorted(
                    view.certificate.sensitivities,
                    key=lambda entry: -1.0 if entry.relative is None else entry.relative,
                    reverse=True,
                )
                shown = entries[:_MOST_SENSITIVITIES]
                rest = len(entries) - len(shown)
                found.append(CertificateView(view, view.certificate, shown, rest))
        return found

    @property
    def notes(self) -> list[str]:
        """Return what the run said besides cells."""
        found = self.record.unknown
        told = [
            f"{case}: {note}" for case, notes in found.get("notes", {}).items() for note in notes
        ]
        told += [str(change.get("text", "")) for change in found.get("changes", ())]
        told += [
            f"warning: {view.cell.id} reports another value than it trains with"
            for view in self.judged
            if view.cell.verdict not in ("mismatch", "semantic")
            and view.cell.counts.get("mismatch")
        ]
        return told

    @property
    def exactness(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return per case what exact mode proved: `record.ExactInfo`, or its JSON form."""
        found = msgspec.to_builtins(self.record.unknown.get("exact", {}))
        return [(case, _pairs(proof)) for case, proof in found.items()]

    @property
    def tables(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return titled tables of names and values: environment, settings, discovery."""
        record = self.record
        run = [("tool", record.tool), ("command", " ".join(record.command))]
        run += [("exit code", str(record.exit_code)), ("schema", record.schema_version)]
        if record.case is not None:
            run += [("source SHA-256", record.case.source_hash), ("seed", str(record.case.seed))]
        told = (
            ("Run", run),
            ("Environment", _pairs(record.environment)),
            ("Settings", _pairs(_settings(record.settings))),
            ("Found in the file", _pairs(record.discovered)),
        )
        return [(title, pairs) for title, pairs in told if pairs]


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
    order = {Verdict.MISMATCH: 2, Verdict.SEMANTIC: 1}

    def weight(row: Row) -> tuple[int, bool, float]:
        # What only follows from another difference is no evidence of its own.
        share = _share(row, limits)
        size = math.inf if share is not None and math.isnan(share) else share or 0.0
        return order.get(Verdict(row.verdict), 0), row.downstream_of is None, size

    found: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=weight, reverse=True):
        found.setdefault((row.stage, row.name), row)
    return [(row, _share(row, limits)) for row in list(found.values())[:most]]


def _matrix(case: str, views: list[CellView], condition: str | None) -> Matrix:
    """Arrange the cells of a case; by ranks where most styles have a mesh of their own."""
    has_dtypes = len({view.cell.dtype for view in views}) > 1
    styles = list(dict.fromkeys(view.cell.style for view in views))
    meshes = {view.cell.mesh for view in views}
    pairs = {(view.cell.style, view.cell.mesh) for view in views}
    is_by_ranks = 2 * len(pairs) < len(styles) * len(meshes)

    def column(view: CellView) -> str:
        ranks = view.cell.world_size
        name = f"{ranks} rank{'' if ranks == 1 else 's'}" if is_by_ranks else view.cell.mesh
        return f"{name}, {view.cell.dtype}" if has_dtypes else name

    ordered = sorted(views, key=lambda view: view.cell.world_size) if is_by_ranks else views
    columns = list(dict.fromkeys(column(view) for view in ordered))
    lines = [
        (
            style,
            [[v for v in views if v.cell.style == style and column(v) == name] for name in columns],
        )
        for style in styles
    ]
    return Matrix(case, columns, lines, is_by_ranks, condition)


def _pairs(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as text, a dict inside as its own pairs."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += [(f"{name}: {inner}", str(text)) for inner, text in value.items()]
        else:
            text = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((name, text or "none"))
    return found


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with meshes as the command line has them, not as pairs."""
    meshes = settings.get("mesh")
    if not isinstance(meshes, list):
        return settings
    told = (
        ",".join(f"{axis}={size}" if axis else str(size) for axis, size in mesh) for mesh in meshes
    )
    return {**settings, "mesh": "; ".join(told)}


def _cells(count: int) -> str:
    """Return `1 cell`, `2 cells`."""
    return f"{count} cell{'' if count == 1 else 's'}"
