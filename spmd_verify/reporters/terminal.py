"""The terminal report: one table, then the first divergence of every failing cell.

Torch-free. Numbers are formatted before tabulate sees them, with `disable_numparse`: otherwise
it turns "0012" into 12 and ignores our formats.
"""

from typing import Final

from tabulate import tabulate

import spmd_verify.reporters.paragraphs as paragraphs
from spmd_verify.record import Cell, Record
from spmd_verify.visible import visible

# SGR colours of a verdict; all others are yellow: nobody knows.
_COLORS: Final = {"exact": 32, "rounding": 32, "mismatch": 31, "semantic": 31, "error": 31}
_UNSURE: Final = 33


def render(
    record: Record, *, verbosity: int = 0, explain: bool = False, has_color: bool = False
) -> str:
    """Return the report as text without a final newline.

    Args:
        record: A finished record.
        verbosity: 1 adds the tensors of every cell that are not `exact`, 2 adds those too.
        explain: Put first what discovery found.
        has_color: Color the verdicts of cells.
    """
    blocks = []
    if explain:
        blocks.append(_discovered(record))
    blocks.append(_table(record, has_color=has_color))
    blocks += [_failure(cell) for cell in record.cells if paragraphs.needs_words(record, cell)]
    if verbosity > 0:
        blocks += [_tensors(cell, verbosity) for cell in record.cells if cell.tensors]
    blocks.append("\n".join(paragraphs.summary(record)))
    return "\n\n".join(block for block in blocks if block)


def _discovered(record: Record) -> str:
    """Return one line per hook."""
    width = max((len(name) for name in record.discovered), default=0)
    found = record.discovered.items()
    return "\n".join(visible(f"{name:<{width}}  {value}") for name, value in found)


def _table(record: Record, *, has_color: bool) -> str:
    """Return the table of cells."""
    headers, lines = paragraphs.cell_table(record)
    if has_color:
        at = headers.index("verdict")
        for line in lines:
            line[at] = f"\x1b[{_COLORS.get(line[at], _UNSURE)}m{line[at]}\x1b[0m"
    return str(tabulate(lines, headers=headers, disable_numparse=True))


def _failure(cell: Cell) -> str:
    """Return the paragraph of one cell that did not simply pass."""
    lines = [f"  {line}" for line in paragraphs.paragraph(cell)]
    return "\n".join([paragraphs.heading(cell), *lines])


def _tensors(cell: Cell, verbosity: int) -> str:
    """Return the table of a cell's tensors."""
    rows = [row for row in cell.tensors if verbosity > 1 or row.verdict != "exact"]
    hidden = len(cell.tensors) - len(rows)
    lines = [paragraphs.row_line(row) for row in rows]
    title = visible(f"{cell.id}: {len(cell.tensors)} tensors, {paragraphs.counted(cell.counts)}")
    note = f"\n({hidden} exact ones not shown; -vv shows them)" if hidden else ""
    table = tabulate(lines, headers=paragraphs.ROW_HEADERS, disable_numparse=True)
    return f"{title}\n{table}{note}"
