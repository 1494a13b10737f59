"""Names of others in text: nothing in them moves a cursor or starts a line. Torch-free."""


def printable(text: str) -> str:
    r"""Return one line of text with control characters escaped, `\x1b` for ESC."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
