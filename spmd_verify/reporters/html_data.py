"""The rows of a record as the HTML report's script reads them: columns, and each string once.

Torch-free. `page/data.js` is the other side. 24,000 rows take 0.5 MB: numbers are four
characters each (four significant digits over the whole range of float64), a word is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from spmd_verify.record import ROOT, Cell, Record, Row
from spmd_verify.reporters.paragraphs import ranges
from spmd_verify.verdict import STAGES, Verdict
from spmd_verify.visible import visible

_DIGITS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_PAIRS: Final = [one + other for one in _DIGITS for other in _DIGITS]
# Codes of what is no positive finite number; a number is `_OFFSET + exponent * 9000 + mantissa`.
_SPECIAL: Final = {"zero": 0, "none": 1, "inf": 2, "nan": 3}
_OFFSET: Final = 4
_MANTISSAS: Final = 9000
# The smallest float64 above 0 is 4.9e-324.
_LEAST_EXPONENT: Final = -324
# Rows of which the worst element is kept; the first to differ are the ones that are read.
MOST_DETAILS: Final = 2000
# A second value of one name in a step, or the second tensor of a broken tie: `observe.Observer`.
_REPEATED: Final = re.compile(r"[#@]\d+$")
_PLAIN: Final = (Verdict.EXACT, Verdict.ROUNDING)
# Rows of these stages are about the whole step and not about a module.
_WHOLE_STEP: Final = ("inputs", "loss", "clipping")
WHOLE_STEP: Final = "(whole step)"


class Strings:
    """Each string once; a string is its position."""

    def __init__(self) -> None:
        """Start with none."""
        self.found: dict[str, int] = {}

    def at(self, text: str) -> int:
        """Return where a string stands."""
        return self.found.setdefault(text, len(self.found))

    def texts(self) -> list[str]:
        """Return all of them as they are shown, in order."""
        return [visible(text) for text in self.found]


def tables(record: Record, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return everything the script reads.

    Args:
        record: The record.
        cells: What the page already says of each of its cells, by names of `page/data.js`.
    """
    strings = Strings()
    verdicts = _letters(row.verdict for cell in record.cells for row in cell.tensors)
    runs = _letters(row.run for cell in record.cells for row in cell.tensors)
    detailed = MOST_DETAILS
    filled = []
    for cell, said in zip(record.cells, cells, strict=True):
        columns = _columns(cell, strings, verdicts, runs, detailed)
        detailed -= len(columns["details"])
        filled.append({**said, **columns})
    stages = {row.stage for cell in record.cells for row in cell.tensors}
    return {
        "stages": [*(s for s in STAGES if s in stages), *sorted(stages - set(STAGES))],
        "verdicts": {letter: visible(word) for word, letter in verdicts.items()},
        "runs": {letter: visible(word) for word, letter in runs.items()},
        "limits": record.settings.get("limits", {}),
        "left_out": sum(_left_out(cell) for cell in record.cells) - MOST_DETAILS,
        "cells": filled,
        "strings": strings.texts(),
    }


def pack(value: float | None) -> str:
    """Return a number that is not negative as four characters."""
    if value is None:
        code = _SPECIAL["none"]
    elif math.isnan(value):
        code = _SPECIAL["nan"]
    elif math.isinf(value):
        code = _SPECIAL["inf"]
    elif value <= 0.0:
        code = _SPECIAL["zero"]
    else:
        text = f"{value:.3e}"
        mantissa = int(text[0] + text[2:5])
        exponent = int(text[6:])
        code = _OFFSET + (exponent - _LEAST_EXPONENT) * _MANTISSAS + mantissa - 1000
    return _PAIRS[code >> 12] + _PAIRS[code & 4095]


def module_names(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return the module of each (stage, name): its outputs, its parameters and their state."""
    pairs = dict.fromkeys((row.stage, row.name) for row in rows)
    parameters = {
        name for stage, name in pairs if stage in ("parameters", "gradients", "initial_state")
    }
    found = {}
    for stage, name in pairs:
        if stage in _WHOLE_STEP:
            found[stage, name] = WHOLE_STEP
            continue
        single = _REPEATED.sub("", name)
        if stage in ("module_outputs", "eval_outputs"):
            found[stage, name] = single.partition("[")[0]
        else:
            owner = _parameter(single, parameters) if stage == "optimizer_state" else single
            found[stage, name] = owner.rpartition(".")[0] or ROOT
    return found


def _parameter(name: str, parameters: set[str]) -> str:
    """Return the parameter that `parameter.key` is the state of."""
    owner = name
    while owner and owner not in parameters:
        owner = owner.rpartition(".")[0]
    return owner or name.rpartition(".")[0]


def _columns(
    cell: Cell, strings: Strings, verdicts: dict[str, str], runs: dict[str, str], most: int
) -> dict[str, Any]:
    """Return the rows of one cell: a series per tensor and stage, its rows by step."""
    modules = module_names(cell.tensors)
    series: dict[tuple[str, str], list[Row]] = {}
    for row in cell.tensors:
        series.setdefault((row.stage, row.name), []).append(row)
    heads = [rows[0] for rows in series.values()]
    rows = [row for rows in series.values() for row in sorted(rows, key=lambda row: row.step)]
    noted = [(i, row) for i, row in enumerate(rows) if row.verdict not in _PLAIN]
    return {
        "series": {
            "name": [strings.at(head.name) for head in heads],
            "stage": [strings.at(head.stage) for head in heads],
            "module": [strings.at(modules[pair]) for pair in series],
            "dtype": [strings.at(head.dtype) for head in heads],
            "shape": [strings.at(str(head.shape)) for head in heads],
            "layout": [strings.at(head.layout) for head in heads],
            "aliases": [strings.at(", ".join(head.aliases)) for head in heads],
            "rows": [len(rows) for rows in series.values()],
        },
        "rows": {
            "step": "".join(_DIGITS[row.step >> 12 & 63] + _PAIRS[row.step & 4095] for row in rows),
            "verdict": "".join(verdicts[row.verdict] for row in rows),
            "run": "".join(runs[row.run] for row in rows),
            # `row` says which row of dim 0 decided; without it the whole tensor did.
            "norm": "".join("r" if "row" in row.unknown else "t" for row in rows),
            "error": "".join(pack(row.error) for row in rows),
            "noise": "".join(pack(row.noise) for row in rows),
            "ratio": "".join(pack(row.ratio) for row in rows),
            "ulp": "".join(pack(row.max_ulp) for row in rows),
        },
        "details": [_detail(i, row, strings) for i, row in noted[: max(most, 0)]],
    }


def _detail(position: int, row: Row, strings: Strings) -> list[Any]:
    """Return what is said of a row that is not simply equal or rounded."""
    worst, cause = row.worst, row.cause
    element = ["", "", ""]
    if worst is not None:
        element = [str(worst.index), f"{worst.actual:.9g}", f"{worst.expected:.9g}"]
    told = "" if cause is None else f"{cause.kind}: {cause.text}"
    reason = str(row.unknown.get("reason", ""))
    texts = (told, row.downstream_of or "", ranges(row.ranks), reason)
    return [position, *element, *(strings.at(text) for text in texts)]


def _left_out(cell: Cell) -> int:
    """Count the rows that could carry a detail."""
    return sum(row.verdict not in _PLAIN for row in cell.tensors)


def _letters(words: Iterable[str]) -> dict[str, str]:
    """Give every word a letter."""
    return {word: _DIGITS[i] for i, word in enumerate(dict.fromkeys(words))}
