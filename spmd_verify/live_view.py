"""One line on a terminal that says what is running, drawn over four times a second.

Torch-free; imports rich, so it is imported on a terminal only.
"""

from collections.abc import Callable
from typing import Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_STYLE: Final = "cyan"


class LiveView:
    """A line that is asked for again at every drawing."""

    def __init__(self, stream: TextIO, line: Callable[[], str], *, has_color: bool) -> None:
        """Begin to draw.

        Args:
            stream: A terminal.
            line: Returns the line as it is now, in characters that the stream has.
            has_color: Color what moves.
        """
        self._line = line
        self._console = Console(
            file=stream,
            force_terminal=True,
            no_color=not has_color,
            highlight=False,
            markup=False,
            emoji=False,
        )
        # ASCII, so that no terminal misses a character of it.
        self._spinner = Spinner("line", style=_STYLE)
        self._live = Live(
            console=self._console,
            get_renderable=self._drawn,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def print_above(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def stop(self) -> None:
        """Remove the line."""
        self._live.stop()

    def _drawn(self) -> Spinner:
        """Return what to draw."""
        self._spinner.update(text=Text(self._line(), no_wrap=True, overflow="ellipsis"))
        return self._spinner
