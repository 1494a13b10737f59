"""Names and messages made harmless for the formats that show them. Torch-free.

A parameter may be called anything: a terminal must not obey an escape sequence in its name, and
no format may take a part of it for its own syntax.
"""

import html
import re
from typing import Final

from spmd_verify.visible import lines_of, visible

# XML 1.0, production Char, leaves these out; surrogates and control characters are made visible.
_NO_XML: Final = re.compile("[\ufffe\uffff]")
# ASCII punctuation that begins something in GitHub's Markdown, also inside of a table.
_MARKDOWN: Final = re.compile(r"([\\`*\[\]|~$@#!])|((?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")


def xml_text(text: str) -> str:
    """Return text of one or more lines without what XML forbids; the writer escapes the rest."""
    return _NO_XML.sub("", "\n".join(lines_of(text)))


def xml_name(text: str) -> str:
    """Return a name for an XML attribute."""
    return _NO_XML.sub("", visible(text))


def markdown(text: str) -> str:
    """Return a line that Markdown, its tables and HTML inside of it leave as it is."""
    plain = html.escape(visible(text), quote=False)
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", plain)


def html_line(text: str) -> str:
    """Return a line for inside of an HTML element, which Markdown does not look into."""
    return html.escape(visible(text), quote=False)


def preformatted(lines: list[str]) -> str:
    """Return lines as an HTML block that Markdown does not look into."""
    told = "\n".join(html.escape(visible(line, keeping="\t"), quote=False) for line in lines)
    return f"<pre>\n{told}\n</pre>"
