"""The words that several reports share: a cell in a table, and why it fails. Torch-free.

Everything is plain text in lines, with no control character left in them; a format escapes them
for itself.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from spmd_verify import exit_codes
from spmd_verify.gate import full_name, suffix_of
from spmd_verify.planting import certificate
from spmd_verify.record import Cell, ExactInfo, Record, Row
from spmd_verify.ties.replay import described
from spmd_verify.verdict import LIMITS
from spmd_verify.visible import lines_of, visible

NOTHING: Final = "-"
ROW_HEADERS: Final = ("stage", "step", "tensor", "verdict", "error / noise", "ulp", "run")
_HEADERS: Final = ("style", "mesh", "verdict", "worst tensor", "error / noise", "exercised")
_UNJUDGED: Final = ("error", "unsupported")


def fails(record: Record, cell: Cell) -> bool:
    """Say whether a cell makes the run exit with 1 for a number, under the run's settings."""
    return exit_codes.fails(cell, strict=bool(record.settings.get("strict")))


def is_certified(record: Record) -> bool:
    """Say whether faults were planted: a record of `certify`."""
    return any("certificate" in cell.unknown for cell in record.cells)


def is_uncertified(record: Record, cell: Cell) -> bool:
    """Say whether a cell that was judged fails `certify`: not every planted fault was caught."""
    return is_certified(record) and cell.verdict not in _UNJUDGED and certificate.is_open(cell)


def waiver(cell: Cell) -> str:
    """Return why a cell that would fail may, and how long; empty where no waiver holds."""
    if cell.gate is None or cell.gate.waived is None:
        return ""
    until = f" until {cell.gate.until}" if cell.gate.until else ""
    return visible(f"waived{until}: {cell.gate.waived}")


def gate_lines(record: Record) -> list[str]:
    """Return what the run said of its waivers and its baseline."""
    return [line for said in _listed(record, "gate") for line in lines_of(str(said))]


def warnings(record: Record) -> list[str]:
    """Return what of `gate_lines` asks somebody to do something: a waiver that is over, say."""
    return [line for line in gate_lines(record) if line.startswith("warning")]


def regressions(record: Record) -> list[tuple[str, str]]:
    """Return name and text of each cell that is worse than the baseline, and else would pass."""
    found = record.unknown.get("baseline")
    changes = found.get("changes") if isinstance(found, Mapping) else None
    suffix = suffix_of(record.settings)
    told = {
        full_name(cell, suffix)
        for cell in record.cells
        if cell.verdict == "error" or fails(record, cell)
    }
    return [
        (visible(str(change.get("name"))), visible(f"{change.get('kind')}: {change.get('text')}"))
        for change in (changes if isinstance(changes, list) else ())
        if isinstance(change, Mapping)
        and change.get("is_regression") is True
        and change.get("name") not in told
    ]


def _listed(record: Record, key: str) -> list[Any]:
    """Return a list that the record keeps beside its fields; empty where it is none."""
    found = record.unknown.get(key)
    return found if isinstance(found, list) else []


def needs_words(record: Record, cell: Cell) -> bool:
    """Say whether a cell gets a paragraph of its own."""
    is_told = cell.verdict in (*_UNJUDGED, "undetermined") or bool(cell.ties)
    return is_told or fails(record, cell)


def heading(cell: Cell) -> str:
    """Return what a paragraph is about."""
    return visible(f"{cell.id}, mesh {cell.mesh}, {cell.dtype}: {cell.verdict}")


def paragraph(cell: Cell) -> list[str]:
    """Return why a cell did not simply pass, in lines.

    That is the reason, the first divergence with its worst element, what is only downstream of
    it, the cause and the remedy, as far as the record has them.
    """
    reason = cell.reason
    row = first_row(cell)
    lines: list[str] = []
    if cell.first_divergence is not None:
        if cell.ties and described(cell.ties) not in reason:
            lines.append(f"{described(cell.ties)}; it does not explain what follows")
        lines += _divergence(cell, row)
    lines += _cause(cell, row)
    if cell.verdict == "error" and cell.log:
        lines.append(f"log: {cell.log}")
    return [*lines_of(reason), *(visible(line) for line in lines)]


def _divergence(cell: Cell, row: Row | None) -> list[str]:
    """Return where a cell first differs, by how much, and what is only downstream of it."""
    first = cell.first_divergence
    assert first is not None
    lines = [f"first divergence: step {first.step}, {first.stage}, {first.tensor}"]
    if row is not None:
        lines += _measured(row)
    if first.operator:
        source = f" at {first.source}" if first.source else ""
        lines.append(f"first differing operator: {first.operator}{source}")
    if first.located:
        lines.append(f"located by teacher forcing: {first.located}")
    downstream = sum(1 for each in cell.tensors if each.downstream_of)
    if downstream:
        tensors = "1 later tensor is" if downstream == 1 else f"{downstream} later tensors are"
        lines.append(f"{tensors} only downstream of it")
    return lines


def _measured(row: Row) -> list[str]:
    """Return the worst element of a row, and how far it is above the noise on which ranks."""
    lines = []
    if row.worst is not None:
        index = ", ".join(str(position) for position in row.worst.index)
        ulp = f", {row.max_ulp} ulp" if row.max_ulp is not None else ""
        lines.append(
            f"worst element [{index}]: actual {row.worst.actual!r}, expected "
            f"{row.worst.expected!r}{ulp}"
        )
    ratio = f"{number(row.ratio)} x the noise" if row.ratio is not None else "no noise floor"
    if not row.noise and (differing := row.unknown.get("differing")):
        ratio = f"{differing} of {math.prod(row.shape)} elements differ where no bit may"
    ranks = f", ranks {ranges(row.ranks)}" if row.ranks else ""
    return [*lines, f"{ratio}{ranks}"]


def _cause(cell: Cell, row: Row | None) -> list[str]:
    """Return the cause of a cell, and the remedy."""
    cause = (row.cause if row else None) or cell.cause
    if cause is None:
        return []
    residual = ""
    if cause.residual is not None and math.isfinite(cause.residual):  # else: no fit, no noise
        residual = f" (residual {number(cause.residual)} x noise)"
    lines = [f"cause: {cause.kind}: {cause.text}{residual}"]
    if cause.kind == "unexplained":
        lines += [f"could not be run: {what}" for what in cell.unknown.get("not_run", ())]
    if cause.remedy:
        lines.append(f"remedy: {cause.remedy}")
    return lines


def first_row(cell: Cell) -> Row | None:
    """Return the row of the first divergence, the failing one where a name has several."""
    first = cell.first_divergence
    if first is None:
        return None
    place = (first.step, first.stage, first.tensor)
    rows = [row for row in cell.tensors if (row.step, row.stage, row.name) == place]
    failing = [row for row in rows if row.cause is not None]
    return next(iter(failing or rows), None)


def cell_table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return headers and lines of the table of cells.

    Case, dtype and the SGD probe have a column only where there is something to tell apart.
    """
    has_cases = len({cell.case for cell in record.cells}) > 1
    has_dtypes = len({cell.dtype for cell in record.cells}) > 1
    has_probes = any("probe" in cell.unknown for cell in record.cells)
    headers = ["case"] * has_cases + ["dtype"] * has_dtypes + [*_HEADERS, "fallbacks", "seconds"]
    lines = [
        [cell.case] * has_cases + [cell.dtype] * has_dtypes + _cell_line(cell)
        for cell in record.cells
    ]
    if has_probes:
        at = headers.index("verdict") + 1
        headers.insert(at, "sgd probe")
        for cell, line in zip(record.cells, lines, strict=True):
            line.insert(at, str(cell.unknown.get("probe", {}).get("verdict", NOTHING)))
    return headers, [[visible(text) for text in line] for line in lines]


def _cell_line(cell: Cell) -> list[str]:
    """Return the columns of one cell."""
    worst = cell.worst
    return [
        cell.style,
        cell.mesh,
        cell.verdict,
        f"{worst.tensor} ({worst.stage}, step {worst.step})" if worst else NOTHING,
        over(worst.error, worst.noise, worst.ratio) if worst else NOTHING,
        f"{cell.exercised.n} of {cell.exercised.of}" if cell.exercised else NOTHING,
        counted(cell.fallbacks) or "none",
        f"{cell.duration_seconds:.1f}" if cell.duration_seconds else NOTHING,
    ]


def row_line(row: Row) -> list[str]:
    """Return the columns of one tensor, under `ROW_HEADERS`."""
    return [
        visible(row.stage),
        str(row.step),
        visible(row.name),
        visible(row.verdict),
        over(row.error, row.noise, row.ratio),
        NOTHING if row.max_ulp is None else str(row.max_ulp),
        visible(row.run),
    ]


def summary(record: Record) -> list[str]:
    """Return `closing`, and what the gate said."""
    return [*closing(record), *gate_lines(record)]


def closing(record: Record) -> list[str]:
    """Return the closing lines: how many differ, the head-room that is left, and every note."""
    judged = [cell for cell in record.cells if cell.verdict not in _UNJUDGED]
    failed = [cell for cell in judged if fails(record, cell)]
    others = _others(record.cells, judged)
    lines = [f"{len(failed)} of {len(judged)} cells fail{others}{_head_room(judged, failed)}"]
    undetermined = sum(cell.counts.get("undetermined", 0) for cell in judged)
    unexercised = sum(cell.counts.get("not_exercised", 0) for cell in judged)
    if undetermined or unexercised:
        lines.append(
            f"{undetermined} rows undetermined, {unexercised} not exercised (-v lists them)"
        )
    lines += [
        f"warning: {cell.id} reports another value than it trains with; --strict fails for it"
        + (f": {cell.cause.text}" if cell.cause else "")
        for cell in judged
        if cell.verdict not in ("mismatch", "semantic") and cell.counts.get("mismatch")
    ]
    return [*(visible(line) for line in lines), *_notes(record, judged, failed)]


def _notes(record: Record, judged: list[Cell], failed: list[Cell]) -> list[str]:
    """Return what else there is to say, of cells and of cases."""
    notes = [
        f"note: {visible(cell.id)}: {cell.message}"
        for cell in judged
        if cell.message and cell not in failed
    ]
    conditions = record.unknown.get("conditions", {}).items()
    notes += [f"{visible(case)}: {text}" for case, text in conditions]
    for address, found in record.unknown.get("exact", {}).items():
        notes += _exactness(visible(address), found)
    for address, texts in record.unknown.get("notes", {}).items():
        notes += [f"note: {visible(address)}: {text}" for text in texts]
    return [line for note in notes for line in lines_of(note)]


def _head_room(judged: list[Cell], failed: list[Cell]) -> str:
    """Say how much of the allowed error is used where nothing fails."""
    measured = [cell for cell in judged if not cell.counts.get("mismatch")]
    shares = [(share, cell) for cell in measured if (share := _share(cell)) is not None]
    if failed or not shares:
        return ""
    share, cell = max(shares, key=lambda pair: pair[0])
    assert cell.worst is not None
    where = f"{cell.style}, {cell.worst.stage} {cell.worst.tensor}"
    return f"; worst {share:.2f} of the allowed error ({where})"


def _exactness(address: str, found: Any) -> list[str]:
    """Say what exact mode proved of a case: `record.ExactInfo`, or its JSON form.

    Surrogates of backward kernels are in the record only.
    """
    info = msgspec.convert(found, ExactInfo, from_attributes=True)
    used = f"{info.bits} of {info.precision} bits used"
    where = f" ({info.where})" if info.where else ""
    lines = [f"exact: {address}: {used}{where}"]
    if info.doubts:
        lines = [f"not exact: {address}: {info.doubts[0]}; the rest: {used}{where}"]
        lines += [f"  also in doubt: {why}" for why in info.doubts[1:]]
    places: dict[str, list[str]] = {}
    for surrogate in info.surrogates:
        name, _, place = surrogate.partition(" at ")
        if not place.startswith("backward"):
            places.setdefault(name, []).append(place)
    if places:
        told = (f"{name} ({', '.join(found)})" for name, found in places.items())
        lines.append(f"  surrogates for: {', '.join(told)}")
    return lines


def _others(cells: list[Cell], judged: list[Cell]) -> str:
    """Say how many cells have no verdict about the numbers."""
    counts = {word: sum(cell.verdict == word for cell in cells) for word in _UNJUDGED}
    told = [f"{count} {word}" for word, count in counts.items() if count]
    return f" ({', '.join(told)})" if told and len(judged) < len(cells) else ""


def _share(cell: Cell) -> float | None:
    """Return the largest ratio as a share of the limit; None where nothing differs."""
    limit = LIMITS.get((cell.dtype, "tensor"))
    if cell.worst is None or limit is None or not math.isfinite(cell.worst.ratio):
        return None
    return cell.worst.ratio / limit


def over(error: float | None, noise: float | None, ratio: float | None) -> str:
    """Return `error / noise = ratio`."""
    if error is None:
        return NOTHING
    if noise is None or ratio is None:
        return number(error)
    return f"{number(error)} / {number(noise)} = {number(ratio)}"


def number(value: float) -> str:
    """Return a number with three significant digits; 0 as 0."""
    return "0" if value == 0 else f"{value:.3g}"


def counted(counts: dict[str, int]) -> str:
    """Return `name x n` of every entry, most first."""
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} x {count}" for name, count in pairs if count)


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
