"""The HTML report: one file with its data, style and script inside. Torch-free.

Opened from disk it asks for nothing: a content security policy forbids every request and every
script but this one, whose digest it names. `html_view` is what is said without scripts,
`html_data` what the script shows; `page/` has the template, the style and the scripts.
"""

from __future__ import annotations

import base64
import hashlib
import math
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spmd_verify.record import Record
from spmd_verify.reporters.html_cell import CellView
from spmd_verify.reporters.html_data import tables
from spmd_verify.reporters.html_text import NOTHING, in_script, number
from spmd_verify.reporters.html_view import Overview
from spmd_verify.visible import visible

_FOLDER: Final = "page"
_SCRIPTS: Final = ("data.js", "charts.js", "heat.js", "table.js", "page.js")


def render(record: Record) -> bytes:
    """Return a record as one HTML page."""
    page = Overview(record)
    data = tables(record, [_said(view) for view in page.cells])
    script = '"use strict";(() => {\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();"
    environment = Environment(
        loader=PackageLoader("spmd_verify.reporters", _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_final,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, decades=_decades)
    text = environment.get_template("report.html.j2").render(
        page=page,
        record=record,
        data=Markup(in_script(data)),
        style=Markup(_read("report.css")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return text.encode(errors="backslashreplace")


def _said(view: CellView) -> dict[str, Any]:
    """Return what the script needs of a cell besides its rows."""
    cell, first, worst = view.cell, view.cell.first_divergence, view.cell.worst
    return {
        "key": view.key,
        "case": visible(cell.case),
        "style": visible(cell.style),
        "mesh": visible(cell.mesh),
        "dtype": visible(cell.dtype),
        "verdict": visible(cell.verdict),
        "fails": view.is_failing,
        "growth": [str(value) for value in view.growth],
        "first": None if first is None else _named(first.stage, first.tensor),
        "worst": None if worst is None else _named(worst.stage, worst.tensor),
    }


def _named(stage: str, tensor: str) -> dict[str, str]:
    """Return which tensor is meant, in the words of the rows."""
    return {"stage": visible(stage), "tensor": visible(tensor)}


def _decades(value: float) -> int:
    """Return where a relative error lies between 1e-16 and 1, in percent of the decades."""
    return round(100 * min(max(math.log10(value) / 16 + 1, 0), 1)) if value > 0 else 0


def _final(value: Any) -> Any:
    """Make whatever a template puts out safe to look at."""
    if value is None:
        return NOTHING
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    """Return a file of the page."""
    return (files("spmd_verify.reporters") / _FOLDER / name).read_text(encoding="utf-8")
