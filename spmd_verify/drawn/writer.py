"""Write a drawn model's source line by line, keeping track of shapes.

A drawn model is its source: what is printed in a failure is what ran. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Layer(Protocol):
    """A plain spec that writes itself for whatever shape it meets."""

    def write(self, writer: Writer) -> None:
        """Append the lines that turn `x` into the next `x`, and its members."""
        ...


@dataclass
class Writer:
    """The source of a model under construction; `x` is [batch, tokens, width].

    A layer fits itself to the sizes it finds, so that any list of layers is a model and
    every shorter list too: that is what makes a failing model shrink.

    Attributes:
        batch: Samples in the global batch.
        tokens: Current size of dim 1 of `x`.
        width: Current size of dim 2 of `x`.
        members: Lines of `__init__`.
        body: Lines of `forward`.
        vocabulary: Rows of the input embedding, 0 where inputs are features.
    """

    batch: int
    tokens: int
    width: int
    members: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    vocabulary: int = 0

    def member(self, name: str, value: str) -> str:
        """Add a module or parameter; return how `forward` names it."""
        full = f"{name}{len(self.members)}"
        self.members.append(f"self.{full} = {value}")
        return f"self.{full}"

    def parameter(self, name: str, *shape: int, frozen: bool = False) -> str:
        """Add a normal parameter of the given shape; return how `forward` names it."""
        sizes = ", ".join(str(n) for n in shape) if shape else "()"
        tail = ", requires_grad=False" if frozen else ""
        return self.member(name, f"nn.Parameter(torch.randn({sizes}) * 0.5{tail})")

    def buffer(self, name: str, value: str) -> str:
        """Add a buffer; return how `forward` names it."""
        full = f"{name}{len(self.members)}"
        self.members.append(f"self.register_buffer('{full}', {value})")
        return f"self.{full}"

    def lines(self, *lines: str) -> None:
        """Append lines to `forward`."""
        self.body.extend(lines)

    def inner(self, layers: Sequence[Layer]) -> list[str]:
        """Write layers apart; return their lines instead of appending them.

        The layers' members are added, and `tokens` and `width` are those after them.
        """
        outside, self.body = self.body, []
        for layer in layers:
            layer.write(self)
        written, self.body = self.body, outside
        return written

    def divisor(self, wanted: int, size: int) -> int:
        """Return the largest divisor of `size` that is at most `wanted`, at least 1."""
        return next(n for n in range(max(1, min(wanted, size)), 0, -1) if size % n == 0)

    def fresh(self, name: str) -> str:
        """Return a local name no earlier line of this `forward` uses."""
        return f"{name}{len(self.members)}_{len(self.body)}"


def indented(lines: Sequence[str], by: int) -> str:
    """Return the lines joined, each behind `by` spaces."""
    return "\n".join(" " * by + line for line in lines)


Write = Callable[[Writer], None]
