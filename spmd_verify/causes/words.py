"""How causes are written: numbers, ranks, lists of names, and the record's `Cause`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from spmd_verify.record import Cause

# More names than this are counted, not listed.
MOST_NAMES = 6


def cause(kind: str, text: str, **more: Any) -> Cause:
    """Return a cause; `more` are the other fields of the record's."""
    return Cause(kind=kind, text=text, **more)


def number(value: float) -> str:
    """Return a factor: `2.0000`, `0.5000`, `1 + 1e-04` close to 1."""
    if math.isfinite(value) and 0.0 < abs(value - 1.0) < 1e-3:
        return f"{value:.9g}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list; of many the first ones and how many more."""
    shown = ", ".join(names[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 1` or `rank 1, rank 3`."""
    return ", ".join(f"rank {rank}" for rank in sorted(set(ranks)))


def rows_text(rows: Sequence[int]) -> str:
    """Return indices as ranges: `0-3, 7`."""
    spans: list[list[int]] = []
    for row in sorted(rows):
        if spans and row == spans[-1][1] + 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:8]]
    return ", ".join(shown) + (" and more" if len(spans) > 8 else "")


def meaning(k: float, tolerance: float, axes: Mapping[str, int]) -> tuple[str, str | None]:
    """Return what a factor is, and the axis it belongs to; empty where it means nothing.

    Args:
        k: The factor.
        tolerance: Its relative noise.
        axes: Mesh axes, `{name: ranks}`.
    """
    if abs(k) <= tolerance:
        return "it is zero", None
    for size in dict.fromkeys(size for size in axes.values() if size > 1):
        names = [name for name, own in axes.items() if own == size]
        ranks = f"the {size} ranks of {' or '.join(names)}"
        for text, value in (
            (ranks, float(size)),
            (f"1 / {ranks}", 1.0 / size),
            (f"the square root of {ranks}", math.sqrt(size)),
            (f"1 / the square root of {ranks}", 1.0 / math.sqrt(size)),
            (f"the square of {ranks}", float(size) ** 2),
            (f"1 / the square of {ranks}", float(size) ** -2),
        ):
            if abs(k / value - 1.0) <= tolerance:
                return text, names[0]
    ratio = Fraction(k).limit_denominator(24)
    if ratio and abs(k / float(ratio) - 1.0) <= tolerance:
        return f"{ratio.numerator}/{ratio.denominator}" if ratio.denominator > 1 else str(
            ratio.numerator
        ), None
    return "", None


def names_of(rows: Iterable[Any]) -> list[str]:
    """Return the names of rows, each once, in order."""
    return list(dict.fromkeys(row.name for row in rows))


def owners_of(names: Iterable[str]) -> list[str]:
    """Return the parameters whose optimizer state some names are, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))
