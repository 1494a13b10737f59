"""What the HTML report says of a record before any script runs: a view for the template.

Torch-free. Nothing here is judged anew: verdicts, causes and limits are the record's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from spmd_verify.exit_codes import FAILED
from spmd_verify.planting.certificate import SURVIVED
from spmd_verify.record import Record
from spmd_verify.reporters.html_cell import GLYPHS, CellView, CertificateView, certified, seen
from spmd_verify.reporters.paragraphs import gate_lines

# Rows of all tables that need no script, together; each cell has at least three.
_STATIC_ROWS: Final = 400
_MOST_ROWS: Final = 10


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
        self.cells = [seen(cell, taken, limits, most, strict=strict) for cell in record.cells]

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
        """Return the cells that neither fail nor pass: rounding, a tie or a waiver decides."""
        return [
            view
            for view in self.judged
            if not view.is_failing
            and (view.cell.verdict == "undetermined" or view.cell.ties or view.is_waived)
        ]

    @property
    def waived(self) -> list[CellView]:
        """Return the cells that differ and that the run let pass."""
        return [view for view in self.judged if view.is_waived]

    @property
    def gate(self) -> list[str]:
        """Return what the run said of waivers and of its baseline."""
        return gate_lines(self.record)

    @property
    def exits_otherwise(self) -> bool:
        """Say whether the run exits with 1 though no cell fails: a baseline, a certificate."""
        return self.record.exit_code == FAILED and not self.failing and not self.errors

    @property
    def state(self) -> str:
        """Return the class of the headline; `undetermined` where the cells are not all of it."""
        if self.failing:
            return "mismatch"
        if self.errors:
            return "error"
        if self.survived or self.waived or self.exits_otherwise:
            return "undetermined"
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
        if self.waived:
            word = "differs and is" if len(self.waived) == 1 else "differ and are"
            return f"Nothing fails; {len(self.waived)} of {judged} cells {word} waived"
        return f"All {judged} cells pass" if judged > 1 else "The one cell passes"

    @property
    def closest(self) -> CellView | None:
        """Return the passing cell with the least head-room."""
        passing = [
            v for v in self.judged if not (v.is_failing or v.is_waived) and v.share is not None
        ]
        return max(passing, key=lambda view: view.share or 0.0, default=None)

    @property
    def tally(self) -> list[tuple[str, str, int]]:
        """Return verdict, sign and number of cells."""
        found = Counter(view.cell.verdict for view in self.cells)
        # A record of a newer version may have words that this one does not know.
        words = [*(word for word in GLYPHS if word in found), *(found.keys() - GLYPHS.keys())]
        return [(word, GLYPHS.get(word, "?"), found[word]) for word in words]

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
        return [
            certified(view, view.certificate) for view in self.cells if view.certificate is not None
        ]

    @property
    def caught(self) -> int:
        """Count the planted faults that were caught, over all cells."""
        return sum(each.caught for each in self.certified)

    @property
    def survived(self) -> int:
        """Count the planted faults that were not."""
        return sum(each.found.count(SURVIVED) for each in self.certified)

    @property
    def uncertified(self) -> int:
        """Count the cells without a certificate."""
        return len(self.cells) - len(self.certified)

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
