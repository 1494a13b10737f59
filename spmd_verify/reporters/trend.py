"""The trend page of a history: a table of cells with a line of ratios each. Torch-free.

As HTML one file without scripts or addresses; as Markdown for git, whose pages show no inline SVG.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Final

from spmd_verify.baselines.history import Entry, Point
from spmd_verify.visible import visible

_HEADERS: Final = ("cell", "verdict", "since", "error / noise", "seconds", "runs")
_WIDTH, _HEIGHT, _MOST_RUNS = 120, 24, 60
# A ratio is drawn on a log scale between these; the limit c of float32 is 4.
_LEAST, _MOST = 1e-2, 1e4
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+!|~>-])")
_STYLE: Final = (
    "body{font:14px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.25em .6em;text-align:left}"
    ".fails{background:#fdd}svg{vertical-align:middle}"
)


def render(entries: Sequence[Entry], *, is_html: bool) -> bytes:
    """Return the page of a history, oldest run first."""
    return (_html(entries) if is_html else _markdown(entries)).encode()


def by_environment(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the runs of each environment, oldest first."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.environment, []).append(entry)
    return found


def _cells(entries: Sequence[Entry]) -> list[str]:
    """Return every cell of some runs, those of the last run first."""
    return list(dict.fromkeys(name for entry in reversed(entries) for name in entry.cells))


def _line(name: str, entries: Sequence[Entry]) -> tuple[list[str], list[Point], bool]:
    """Return the texts of a row, the cell's points, and whether it is in the last run."""
    held = [entry for entry in entries if name in entry.cells]
    points = [entry.cells[name] for entry in held]
    last, is_current = points[-1], name in entries[-1].cells
    since = held[-1]
    for entry, point in zip(reversed(held), reversed(points), strict=True):
        if point.verdict != last.verdict:
            break
        since = entry
    day = since.date[:10] + (f" ({since.commit})" if since.commit else "")
    verdict = last.verdict + (f" ({last.cause})" if last.cause else "")
    seconds = "-" if last.seconds is None else f"{last.seconds:.1f}"
    gone = "" if is_current else ", not in the last"
    return (
        [name, verdict, day, _number(last.ratio), seconds, f"{len(points)}{gone}"],
        points,
        is_current,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _html(entries: Sequence[Entry]) -> str:
    """Return one HTML file."""
    parts = []
    for environment, runs in by_environment(entries).items():
        rows = []
        for name in _cells(runs):
            texts, points, is_current = _line(name, runs)
            mark = ' class="fails"' if points[-1].fails and is_current else ""
            cells = "".join(f"<td>{_escaped(text)}</td>" for text in texts)
            rows.append(f"<tr{mark}>{cells}<td>{_sparkline(points[-_MOST_RUNS:])}</td></tr>")
        heads = "".join(f"<th>{head}</th>" for head in (*_HEADERS, "error / noise over runs"))
        parts.append(
            f"<h2>{_escaped(environment)}</h2>\n<p>{_escaped(_summary(runs))}</p>\n<table>\n"
            f"<tr>{heads}</tr>\n" + "\n".join(rows) + "\n</table>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>spmd-verify: trend</title><style>{_STYLE}</style></head>\n<body>\n"
        "<h1>spmd-verify: trend</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _sparkline(points: Sequence[Point]) -> str:
    """Return the ratios of a cell as a small drawing, failing runs as dots."""
    step = _WIDTH / max(len(points) - 1, 1)
    places = [(index * step, _height(point.ratio)) for index, point in enumerate(points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#c00"/>'
        for (x, y), point in zip(places, points, strict=True)
        if point.fails
    )
    return (
        f'<svg width="{_WIDTH + 6}" height="{_HEIGHT + 6}" viewBox="-3 -3 {_WIDTH + 6} '
        f'{_HEIGHT + 6}" role="img" aria-label="error / noise over {len(points)} runs">'
        f'<polyline points="{line}" fill="none" stroke="#36c"/>{dots}</svg>'
    )


def _height(ratio: float | None) -> float:
    """Return the y of a ratio: a log scale, what is beyond it at its ends."""
    if ratio is None or math.isnan(ratio):
        return float(_HEIGHT)
    bounded = min(max(ratio, _LEAST), _MOST)
    return _HEIGHT * (1 - math.log(bounded / _LEAST) / math.log(_MOST / _LEAST))


def _markdown(entries: Sequence[Entry]) -> str:
    """Return one Markdown file; the last eight ratios stand for the drawing."""
    lines = ["# Trend", ""]
    for environment, runs in by_environment(entries).items():
        lines += [f"## {_marked(environment)}", "", _marked(_summary(runs)), ""]
        lines.append(f"| {' | '.join((*_HEADERS, 'last ratios'))} |")
        lines.append("|---" * (len(_HEADERS) + 1) + "|")
        for name in _cells(runs):
            texts, points, _ = _line(name, runs)
            trail = " ".join(_number(point.ratio) for point in points[-8:])
            lines.append(f"| {' | '.join(_marked(text) for text in (*texts, trail))} |")
        lines.append("")
    return "\n".join(lines)


def _summary(runs: Sequence[Entry]) -> str:
    """Say how many runs there are and how the last one ended."""
    last = runs[-1]
    failing = sum(point.fails for point in last.cells.values())
    commit = f" at {last.commit}" if last.commit else ""
    return (
        f"{len(runs)} run{'' if len(runs) == 1 else 's'}; "
        f"the last on {last.date}{commit} by {last.tool}: "
        f"{len(last.cells)} cells, {failing} failing, exit code {last.exit_code}"
    )


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def _marked(text: str) -> str:
    """Return text that Markdown shows as it is; no HTML and no cell border in it."""
    return _MARKDOWN.sub(r"\\\1", html.escape(visible(text), quote=False))
