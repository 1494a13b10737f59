"""Names and numbers as the HTML report shows them. Torch-free.

`escaping.visible` shows what does not print; markup is made harmless by the template's autoescape
and, inside the script, by never parsing data as HTML.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final
from urllib.parse import quote

NOTHING: Final = "-"
# JSON inside a script element must hold no `</script`, no `<!--`, and no line separator of its own.
_ESCAPED: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def number(value: float | None) -> str:
    """Return three significant digits, `1.66e7` for 16575163.9."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    mantissa, is_power, power = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(power)}" if is_power else mantissa


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
