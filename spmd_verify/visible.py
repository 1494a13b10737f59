"""Names of others in lines of text: nothing in them moves a cursor or starts a line. Torch-free."""

import unicodedata
from typing import Final

# Control, format (such as a change of writing direction), surrogate, line and paragraph
# separator: what is not seen, or changes how the rest is seen.
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str, *, keeping: str = "") -> str:
    """Return one line in which every character is seen; `\\n` and `\\x1b` as such.

    Args:
        text: Anything.
        keeping: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        repr(mark)[1:-1]
        if unicodedata.category(mark) in _INVISIBLE and mark not in keeping
        else mark
        for mark in text
    )


def lines_of(text: str) -> list[str]:
    """Split a message of several lines; every line visible, tabs kept."""
    return [visible(line, keeping="\t") for line in text.splitlines()]
