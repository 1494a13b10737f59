"""Names and numbers as the HTML report shows them. Torch-free.

A name is whatever a user called a parameter. Characters that do not print - line ends, escape
sequences, marks that reverse the direction of text - are shown by their codes; markup is made
harmless by the template's autoescape and, inside the script, by never parsing data as HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

NOTHING: Final = "-"
# JSON inside a script element must hold no `</script`, no `<!--`, and no line separator of its own.
_ESCAPED: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def shown(text: str) -> str:
    """Return a text with every character that does not print as its code."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _code(char) for char in text)


def number(value: float | None) -> str:
    """Return three significant digits, `1.66e7` for 16575163.9."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    mantissa, is_power, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if is_power else mantissa


def ranges(ranks: Iterable[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2, 5."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def counted(counts: dict[str, int]) -> str:
    """Return `12 exact, 3 rounding`."""
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def link(key: str) -> str:
    """Return the address of an element of this page, for an `href`."""
    return "#" + quote(key, safe="/,:+@=.")


def in_script(value: Any) -> str:
    """Return JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPED)


def _code(char: str) -> str:
    """Return `\\n`, `\\x1b` or `\\u202e`."""
    return char.encode("unicode_escape").decode()
