"""The terminal report: one table, then the first divergence of every failing cell.

Torch-free. Numbers are formatted here and handed to tabulate as strings with
`disable_numparse`: otherwise it turns "0012" into 12 and ignores our formats.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from tabulate import tabulate

from spmd_verify.exit_codes import fails
from spmd_verify.record import Cell, ExactInfo, Record, Row
from spmd_verify.tie_replay import described
from spmd_verify.verdict import LIMITS

_HEADERS: Final = ("style", "mesh", "verdict", "worst tensor", "error / noise", "exercised")
_ROW_HEADERS: Final = ("stage", "step", "tensor", "verdict", "error / noise", "ulp", "run")
_NOTHING: Final = "-"


def render(record: Record, *, verbosity: int = 0, explain: bool = False) -> str:
    """Return the report as text without a final newline.

    Args:
        record: A finished record.
        verbosity: 1 adds the tensors of every cell that are not `exact`, 2 adds those too.
        explain: Put first what discovery found.
    """
    blocks = []
    if explain:
        blocks.append(_discovered(record))
    blocks.append(_table(record))
    blocks += [_failure(cell) for cell in record.cells if _needs_words(cell, record)]
    if verbosity > 0:
        blocks += [_tensors(cell, verbosity) for cell in record.cells if cell.tensors]
    blocks.append(_summary(record))
    return "\n\n".join(block for block in blocks if block)


def _discovered(record: Record) -> str:
    """Return one line per hook."""
    width = max((len(name) for name in record.discovered), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in record.discovered.items())


def _table(record: Record) -> str:
    """Return the table of cells; with a column for the case where there are several."""
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
            line.insert(at, str(cell.unknown.get("probe", {}).get("verdict", _NOTHING)))
    return str(tabulate(lines, headers=headers, disable_numparse=True))


def _cell_line(cell: Cell) -> list[str]:
    """Return the columns of one cell."""
    worst = cell.worst
    return [
        cell.style,
        cell.mesh,
        cell.verdict,
        f"{worst.tensor} ({worst.stage}, step {worst.step})" if worst else _NOTHING,
        _over(worst.error, worst.noise, worst.ratio) if worst else _NOTHING,
        f"{cell.exercised.n} of {cell.exercised.of}" if cell.exercised else _NOTHING,
        _counted(cell.fallbacks) or "none",
        f"{cell.duration_seconds:.1f}" if cell.duration_seconds else _NOTHING,
    ]


def _needs_words(cell: Cell, record: Record) -> bool:
    """Say whether a cell gets a paragraph below the table."""
    strict = bool(record.settings.get("strict"))
    is_told = cell.verdict in ("error", "unsupported", "undetermined") or bool(cell.ties)
    return is_told or fails(cell, strict=strict)


def _failure(cell: Cell) -> str:
    """Return the paragraph of one cell that did not simply pass."""
    lines = [f"{cell.id}, mesh {cell.mesh}, {cell.dtype}: {cell.verdict}"]
    reason = cell.skipped_reason or cell.undetermined_reason or cell.message
    lines += [f"  {line}" for line in reason.splitlines()]
    row = first_row(cell)
    if cell.first_divergence is not None:
        if cell.ties and described(cell.ties) not in reason:
            lines.append(f"  {described(cell.ties)}; it does not explain what follows")
        lines += _divergence(cell, row)
    cause = (row.cause if row else None) or cell.cause
    if cause is not None:
        residual = ""
        if cause.residual is not None and math.isfinite(cause.residual):  # else: no fit, no noise
            residual = f" (residual {_number(cause.residual)} x noise)"
        lines.append(f"  cause: {cause.kind}: {cause.text}{residual}")
        if cause.kind == "unexplained":
            lines += [f"  could not be run: {what}" for what in cell.unknown.get("not_run", ())]
        if cause.remedy:
            lines.append(f"  remedy: {cause.remedy}")
    if cell.verdict == "error" and cell.log:
        lines.append(f"  log: {cell.log}")
    return "\n".join(lines)


def _divergence(cell: Cell, row: Row | None) -> list[str]:
    """Return where a cell first differs, by how much, and what is only downstream of it."""
    first = cell.first_divergence
    assert first is not None
    lines = [f"  first divergence: step {first.step}, {first.stage}, {first.tensor}"]
    if row is not None and row.worst is not None:
        index = ", ".join(str(position) for position in row.worst.index)
        ulp = f", {row.max_ulp} ulp" if row.max_ulp is not None else ""
        lines.append(
            f"  worst element [{index}]: actual {_value(row.worst.actual)}, expected "
            f"{_value(row.worst.expected)}{ulp}"
        )
    if row is not None:
        ratio = f"{_number(row.ratio)} x the noise" if row.ratio is not None else "no noise floor"
        if not row.noise and (differing := row.unknown.get("differing")):
            ratio = f"{differing} of {math.prod(row.shape)} elements differ where no bit may"
        ranks = f", ranks {_ranges(row.ranks)}" if row.ranks else ""
        lines.append(f"  {ratio}{ranks}")
    if first.operator:
        source = f" at {first.source}" if first.source else ""
        lines.append(f"  first differing operator: {first.operator}{source}")
    if first.located:
        lines.append(f"  located by teacher forcing: {first.located}")
    downstream = sum(1 for each in cell.tensors if each.downstream_of)
    if downstream:
        lines.append(f"  {downstream} later tensors are only downstream of it")
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


def _tensors(cell: Cell, verbosity: int) -> str:
    """Return the table of a cell's tensors."""
    rows = [row for row in cell.tensors if verbosity > 1 or row.verdict != "exact"]
    hidden = len(cell.tensors) - len(rows)
    lines = [
        [
            row.stage,
            str(row.step),
            row.name,
            row.verdict,
            _over(row.error, row.noise, row.ratio),
            _NOTHING if row.max_ulp is None else str(row.max_ulp),
            row.run,
        ]
        for row in rows
    ]
    title = f"{cell.id}: {len(cell.tensors)} tensors, {_counted(cell.counts)}"
    note = f"\n({hidden} exact ones not shown; -vv shows them)" if hidden else ""
    return f"{title}\n{tabulate(lines, headers=_ROW_HEADERS, disable_numparse=True)}{note}"


def _summary(record: Record) -> str:
    """Return the closing lines: how many differ, and the head-room that is left."""
    judged = [cell for cell in record.cells if cell.verdict not in ("error", "unsupported")]
    strict = bool(record.settings.get("strict"))
    failed = [cell for cell in judged if fails(cell, strict=strict)]
    lines = [f"{len(failed)} of {len(judged)} cells fail{_others(record.cells, judged)}"]
    measured = [cell for cell in judged if not cell.counts.get("mismatch")]
    shares = [(share, cell) for cell in measured if (share := _share(cell)) is not None]
    if not failed and shares:
        share, cell = max(shares, key=lambda pair: pair[0])
        assert cell.worst is not None
        lines[0] += (
            f"; worst {share:.2f} of the allowed error "
            f"({cell.style}, {cell.worst.stage} {cell.worst.tensor})"
        )
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
    lines += [
        f"note: {cell.id}: {cell.message}" for cell in judged if cell.message and cell not in failed
    ]
    lines += [f"{case}: {text}" for case, text in record.unknown.get("conditions", {}).items()]
    lines += [_exactness(*pair) for pair in record.unknown.get("exact", {}).items()]
    for address, notes in record.unknown.get("notes", {}).items():
        lines += [f"note: {address}: {note}" for note in notes]
    lines += record.unknown.get("gate", [])  # waivers and the baseline, already printable
    return "\n".join(lines)


def _exactness(address: str, found: Any) -> str:
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
    return "\n".join(lines)


def _others(cells: list[Cell], judged: list[Cell]) -> str:
    """Say how many cells have no verdict about the numbers."""
    words = {"error": 0, "unsupported": 0}
    for cell in cells:
        if cell.verdict in words:
            words[cell.verdict] += 1
    told = [f"{count} {word}" for word, count in words.items() if count]
    return f" ({', '.join(told)})" if told and len(judged) < len(cells) else ""


def _share(cell: Cell) -> float | None:
    """Return the largest ratio as a share of the limit; None where nothing differs."""
    limit = LIMITS.get((cell.dtype, "tensor"))
    if cell.worst is None or limit is None or not math.isfinite(cell.worst.ratio):
        return None
    return cell.worst.ratio / limit


def _over(error: float | None, noise: float | None, ratio: float | None) -> str:
    """Return `error / noise = ratio`."""
    if error is None:
        return _NOTHING
    if noise is None or ratio is None:
        return _number(error)
    return f"{_number(error)} / {_number(noise)} = {_number(ratio)}"


def _number(value: float) -> str:
    """Return a number with three significant digits; 0 as 0."""
    return "0" if value == 0 else f"{value:.3g}"


def _value(value: float) -> str:
    """Return an element's value with every digit that distinguishes it."""
    return repr(value)


def _counted(counts: dict[str, int]) -> str:
    """Return `name x n` of every entry, most first."""
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} x {count}" for name, count in pairs if count)


def _ranges(ranks: Iterable[int]) -> str:
    """Return ranks as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
