"""The version, apart from the package root so that no import cycle can form."""

from typing import Final

__version__: Final = "0.1.0"
