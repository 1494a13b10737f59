"""For GitHub Actions: the step summary, and annotations beside the lines of a file. Torch-free.

A summary over 1 MiB is dropped whole, and of one kind of annotations a step shows the first ten.
Source: docs.github.com, "Workflow commands for GitHub Actions" and "Adding a job summary".
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import spmd_verify.reporters.md as md
import spmd_verify.reporters.paragraphs as paragraphs
from spmd_verify.record import Cell, Record, Row
from spmd_verify.visible import visible

SUMMARY_BYTES: Final = 1024 * 1024
MOST_ANNOTATIONS: Final = 10
_LINE: Final = re.compile(r"(?P<file>.+?):(?P<line>\d+)$")
# One annotation is a few lines on a page; what is longer is cut, and says so.
_MOST_CHARACTERS: Final = 4000


def render(record: Record) -> bytes:
    """Return the step summary: the Markdown report, cut to `SUMMARY_BYTES`.

    Whole lines are left out, last blocks first, and how many of which kind is said.
    """
    # What is said of what is left out is shorter than this, for all blocks together.
    left = SUMMARY_BYTES - 2048
    shown, hidden = [], 0
    for block in md.blocks(record):
        text = _fitting(block, left)
        if text is None:
            hidden += 1
            continue
        shown.append(text)
        left -= len(text.encode()) + 2
    if hidden:
        parts = "part" if hidden == 1 else "parts"
        shown.append(f"{hidden} {parts} of this report left out: GitHub takes 1 MiB")
    return md.join(shown).encode()


def _fitting(block: md.Block, left: int) -> str | None:
    """Return as much of a block as fits into so many bytes; None where nothing of it does."""
    if len(block.text().encode()) <= left:
        return block.text()
    low, high = 0, len(block.items)  # low items fit, or nothing does; high do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(block.text(middle).encode()) <= left else (low, middle)
    text = block.text(low)
    return text if low and len(text.encode()) <= left else None


def stdout(record: Record, text: str) -> str:
    """Return what `--format github` prints: a report, then the annotations.

    Args:
        record: What was found.
        text: The report for the log. Nothing in it is taken for a command.
    """
    told = annotations(record)
    if not text:
        return "\n".join(told)
    # Names and messages are the user's; a line that begins with :: would be a command. The word
    # that ends this state cannot stand in the text, as it is made from it.
    word = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
    return "\n".join([f"::stop-commands::{word}", text, f"::{word}::", *told])


def annotations(record: Record) -> list[str]:
    """Return at most `MOST_ANNOTATIONS` workflow commands of each kind, the worst first.

    Every failing cell is an error; while there is room, so is what is worse than the baseline and
    every other tensor that fails by itself. What the gate warns of is a warning, a waived cell a
    notice. Where there are more of a kind, its last one says how many.
    """
    failing = [cell for cell in record.cells if _is_failing(record, cell)]
    failing.sort(key=_weight, reverse=True)
    worse = paragraphs.regressions(record)
    rows = sorted(_other_rows(failing), key=lambda pair: _ratio(pair[1]), reverse=True)
    waived = [cell for cell in record.cells if paragraphs.waiver(cell)]
    warnings = [line.removeprefix("warning: ") for line in paragraphs.warnings(record)]
    errors = [
        ("cell", (_of_cell(record, cell) for cell in failing), len(failing)),
        ("regression", map(_of_regression, worse), len(worse)),
        ("tensor", (_of_row(*pair) for pair in rows), len(rows)),
    ]
    notices = [("waived cell", (_of_waived(cell) for cell in waived), len(waived))]
    told = [("warning", (_about_run("warning", line) for line in warnings), len(warnings))]
    return [*_kind("error", errors), *_kind("warning", told), *_kind("notice", notices)]


def _kind(kind: str, groups: Sequence[tuple[str, Iterator[str], int]]) -> list[str]:
    """Return the commands of one kind, as many as are shown, and how many more there are.

    Args:
        kind: `error`, `warning` or `notice`.
        groups: What one is, the commands, and how many they are; the most important first.
    """
    total = sum(count for _, _, count in groups)
    room = MOST_ANNOTATIONS if total <= MOST_ANNOTATIONS else MOST_ANNOTATIONS - 1
    shown: list[str] = []
    words = []
    for noun, commands, count in groups:
        taken = list(islice(commands, room - len(shown)))
        shown += taken
        if hidden := count - len(taken):
            words.append(f"{hidden} more {noun}{'s' * (hidden > 1)}")
    if words:
        verb = "" if kind != "error" else " fails" if total - room == 1 else " fail"
        shown.append(_about_run(kind, f"{' and '.join(words)}{verb}: see the report"))
    return shown


def _is_failing(record: Record, cell: Cell) -> bool:
    """Say whether a cell makes the run exit with 1 or 3."""
    is_wrong = cell.verdict == "error" or paragraphs.fails(record, cell)
    return is_wrong or paragraphs.is_uncertified(record, cell)


def _of_cell(record: Record, cell: Cell) -> str:
    """Return the annotation of a failing cell, at the line that differs first if one is known."""
    lines = paragraphs.paragraph(cell)
    if cell.worst is not None:
        worst = cell.worst
        over = paragraphs.over(worst.error, worst.noise, worst.ratio)
        place = visible(f"{worst.tensor} ({worst.stage}, step {worst.step})")
        lines.append(f"worst tensor: {place}, error / noise {over}")
    if paragraphs.is_uncertified(record, cell):
        lines.append("not certified: not every fault that was planted is caught")
    message = "\n".join([paragraphs.heading(cell), *lines])
    return _command("error", {**_place(cell), "title": f"{cell.verdict}: {cell.style}"}, message)


def _of_regression(regression: tuple[str, str]) -> str:
    """Return the annotation of a cell that is worse than the baseline has it."""
    return _about_run("error", ": ".join(regression))


def _of_waived(cell: Cell) -> str:
    """Return the annotation of a cell that would fail and may."""
    message = f"{paragraphs.heading(cell)}\n{paragraphs.waiver(cell)}"
    return _command("notice", {**_place(cell), "title": f"waived: {cell.style}"}, message)


def _about_run(kind: str, message: str) -> str:
    """Return a command about the run, which stands at no line of a file."""
    return _command(kind, {"title": "spmd-verify"}, message)


def _of_row(cell: Cell, row: Row) -> str:
    """Return the annotation of a failing tensor besides the cell's first."""
    over = paragraphs.over(row.error, row.noise, row.ratio)
    lines = [
        visible(f"{cell.id}, mesh {cell.mesh}, {cell.dtype}"),
        visible(f"step {row.step}, {row.stage}, {row.name}: {row.verdict}, error / noise {over}"),
    ]
    if row.cause is not None:
        lines.append(visible(f"cause: {row.cause.kind}: {row.cause.text}"))
    title = f"{row.verdict}: {row.stage} {row.name}"
    return _command("error", {**_place(cell), "title": title}, "\n".join(lines))


def _other_rows(cells: list[Cell]) -> Iterator[tuple[Cell, Row]]:
    """Give the rows that fail by themselves, in their worst step, without the cells' first."""
    for cell in cells:
        first = paragraphs.first_row(cell)
        worst: dict[tuple[str, str], Row] = {}
        for row in cell.tensors:
            if row.verdict in ("mismatch", "semantic") and not row.downstream_of:
                key = row.stage, row.name
                if key not in worst or _ratio(row) > _ratio(worst[key]):
                    worst[key] = row
        for key, row in worst.items():
            if first is None or key != (first.stage, first.name):
                yield cell, row


def _place(cell: Cell) -> dict[str, str]:
    """Return the properties that say where in a file an annotation belongs."""
    first = cell.first_divergence
    if first is not None and first.source and (found := _LINE.fullmatch(first.source)):
        return {"file": found["file"], "line": found["line"]}
    path, dot_py, rest = cell.case.partition(".py")
    if dot_py and (not rest or rest.startswith(":")):
        return {"file": path + dot_py, "line": "1"}
    return {}


def _weight(cell: Cell) -> tuple[int, float]:
    """Order cells: no answer over a wrong one, over what is by design, over the rest."""
    rank = {"error": 3, "mismatch": 2, "semantic": 1}.get(cell.verdict, 0)
    ratio = cell.worst.ratio if cell.worst is not None else 0.0
    return rank, math.inf if math.isnan(ratio) else ratio


def _ratio(row: Row) -> float:
    """Return how far a row is above its noise; NaN is beyond any."""
    ratio = 0.0 if row.ratio is None else row.ratio
    return math.inf if math.isnan(ratio) else ratio


def _command(kind: str, properties: dict[str, str], message: str) -> str:
    """Return one workflow command on one line."""
    told = ",".join(f"{name}={_property(visible(text))}" for name, text in properties.items())
    if len(message) > _MOST_CHARACTERS:
        cut = len(message) - _MOST_CHARACTERS
        message = f"{message[:_MOST_CHARACTERS]}\n... and {cut} more characters"
    return f"::{kind} {told}::{_data(message)}"


def _data(text: str) -> str:
    """Escape a message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property, which ends at a comma or two colons."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
