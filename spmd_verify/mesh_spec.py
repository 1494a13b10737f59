"""Meshes as they are typed: a number, sizes, or named axes. Torch-free."""

import math
from dataclasses import dataclass

from spmd_verify.errors import UsageError
from spmd_verify.style_ids import axis_names, bare_mesh


@dataclass(frozen=True)
class MeshSpec:
    """A mesh as asked for: `(axis name or None, ranks)` per axis, in mesh order.

    Either all axes have names or none has; each style names those without itself.
    """

    axes: tuple[tuple[str | None, int], ...]

    @property
    def num_ranks(self) -> int:
        """Return the world size."""
        return math.prod(size for _, size in self.axes)

    def resolve(self, style: str) -> dict[str, int]:
        """Return `{axis name: ranks}` in mesh order for one style."""
        names = [name for name, _ in self.axes if name is not None]
        sizes = [size for _, size in self.axes]
        if not names and len(sizes) == 1:
            return bare_mesh(style, sizes[0])
        return dict(zip(names or axis_names(style, len(sizes)), sizes, strict=True))

    def text(self, style: str) -> str:
        """Return the form that records hold, `dp=2,tp=2`."""
        return ",".join(f"{name}={size}" for name, size in self.resolve(style).items())


def parse_mesh(text: str, flag: str = "--mesh") -> MeshSpec:
    """Read `4`, `2x2`, `dp=4` or `dp=2,tp=2`.

    Args:
        text: As typed.
        flag: Where it was typed, for messages.

    Raises:
        UsageError: `malformed-mesh`.
    """
    is_sizes = "=" not in text and "," not in text
    parts = [part.strip() for part in text.split("x" if is_sizes else ",")]
    axes: list[tuple[str | None, int]] = []
    for part in parts:
        name, equals, size = part.rpartition("=")
        has_name = bool(equals) and name.strip().isidentifier()
        if not size.strip().isdecimal() or int(size) < 1 or (bool(equals) and not has_name):
            why = f"{part!r} is not AXIS=RANKS with at least one rank"
            raise _malformed_mesh(text, why, flag)
        axes.append((name.strip() if has_name else None, int(size)))
    names = [name for name, _ in axes]
    if not is_sizes and len(axes) > 1 and None in names:
        raise _malformed_mesh(text, "with several axes each needs a name", flag)
    if not is_sizes and len(set(names)) < len(names):
        raise _malformed_mesh(text, "an axis is named twice", flag)
    return MeshSpec(tuple(axes))


def parse_sweep(text: str) -> tuple[MeshSpec, ...]:
    """Read one value of `--mesh-sweep`: meshes without names by commas, or one with names.

    Raises:
        UsageError: `malformed-mesh`.
    """
    parts = [text] if "=" in text else text.split(",")
    return tuple(parse_mesh(part, "--mesh-sweep") for part in parts)


def _malformed_mesh(text: str, why: str, flag: str) -> UsageError:
    return UsageError(
        f"Cannot read the mesh: {flag} {text!r}. {why}. Write a number of ranks such as 4, sizes "
        f"such as 2x2, or named axes such as dp=2,tp=2",
        slug="malformed-mesh",
    )
