"""The Markdown report: tables and paragraphs as GitHub and GitLab show them. Torch-free.

It is made of blocks whose lines can be left out from the end, so that `github` can keep it
below a limit and say what is missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import spmd_verify.reporters.certificates as certificates
import spmd_verify.reporters.paragraphs as paragraphs
from spmd_verify.record import Cell, Record
from spmd_verify.reporters.escaping import html_line, markdown, preformatted

_TITLE: Final = "## spmd-verify"
# A table of failing tensors is there to be looked through, not to be complete; the record is.
MOST_ROWS: Final = 200


@dataclass(frozen=True)
class Block:
    """A part of the report.

    Attributes:
        opening: Lines before the items; empty for none.
        items: Lines that may be left out, least important last.
        closing: Lines after them.
        noun: What an item is, for saying how many are left out.
    """

    opening: str
    items: Sequence[str] = ()
    closing: str = ""
    noun: str = ""

    def text(self, most: int | None = None) -> str:
        """Return the block with at most so many items, and how many are left out."""
        shown = self.items if most is None else self.items[:most]
        parts = [self.opening, *shown, self.closing]
        if hidden := len(self.items) - len(shown):
            parts.append(f"\n... and {hidden} more {self.noun}, left out here")
        return "\n".join(part for part in parts if part)


def render(record: Record) -> bytes:
    """Return the record as Markdown."""
    return join(block.text() for block in blocks(record)).encode()


def join(texts: Iterable[str]) -> str:
    """Put blocks below each other."""
    return "\n\n".join(text for text in texts if text) + "\n"


def blocks(record: Record) -> list[Block]:
    """Return the report in parts: summary, table, why cells fail, their tensors, notes."""
    told = [
        cell
        for cell in record.cells
        if paragraphs.needs_words(record, cell) or paragraphs.waiver(cell)
    ]
    told.sort(key=lambda cell: cell.verdict != "error" and not paragraphs.fails(record, cell))
    summary, *notes = paragraphs.closing(record)
    return [
        Block(f"{_TITLE}\n\n{markdown(summary)}"),
        _cells(record),
        *_gate(record),
        *_certificates(record),
        *(_paragraph(cell) for cell in told),
        *(_tensors(cell) for cell in told if _differing(cell)),
        Block("", [f"- {markdown(note)}" for note in notes], noun="notes"),
    ]


def _cells(record: Record) -> Block:
    """Return the table of cells."""
    headers, lines = paragraphs.cell_table(record)
    at = headers.index("verdict")
    for cell, line in zip(record.cells, lines, strict=True):
        line[at] += ", waived" if paragraphs.waiver(cell) else ""
    return Block(_head(headers), [_line(line) for line in lines], noun="cells")


def _gate(record: Record) -> list[Block]:
    """Return what was said of waivers and the baseline: above what `github` may have to cut."""
    lines = [f"- {markdown(line)}" for line in paragraphs.gate_lines(record)]
    return [Block("### Waivers and baseline\n", lines, noun="lines")] if lines else []


def _certificates(record: Record) -> list[Block]:
    """Return what was planted in a record of `certify`, and what was caught."""
    if not paragraphs.is_certified(record):
        return []
    return [Block(preformatted(certificates.planted(record).splitlines()))]


def _paragraph(cell: Cell) -> Block:
    """Return why one cell did not simply pass."""
    lines = paragraphs.paragraph(cell)
    heading = f"### {markdown(paragraphs.heading(cell))}"
    if why := paragraphs.waiver(cell):
        heading, lines = f"{heading}, waived", [why, *lines]
    return Block(f"{heading}\n\n{preformatted(lines)}")


def _tensors(cell: Cell) -> Block:
    """Return the table of the tensors of a cell that differ."""
    rows = _differing(cell)
    items = [_line(paragraphs.row_line(cell.tensors[at])) for at in rows[:MOST_ROWS]]
    title = f"{cell.id} {cell.mesh} {cell.dtype}: {len(rows)} tensors that differ"
    if len(rows) > MOST_ROWS:
        title += f", the first {MOST_ROWS}"
    opening = f"<details><summary>{html_line(title)}</summary>\n\n{_head(paragraphs.ROW_HEADERS)}"
    return Block(opening, items, "\n</details>", "tensors")


def _differing(cell: Cell) -> list[int]:
    """Return where the rows are that nobody would call equal: causes first, in their order."""
    wrong = [at for at, row in enumerate(cell.tensors) if row.verdict in ("mismatch", "semantic")]
    return sorted(wrong, key=lambda at: cell.tensors[at].downstream_of is not None)


def _head(headers: Sequence[str]) -> str:
    """Return the first two lines of a table."""
    return f"{_line(headers)}\n|{' --- |' * len(headers)}"


def _line(texts: Sequence[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(markdown(text) for text in texts)} |"
