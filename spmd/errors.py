"""The errors of the engine; every message says what, where, got, expected and what to do.

Each error carries a `slug`, the heading of its entry in docs/errors.md. Torch-free.
"""

from __future__ import annotations


class SpmdError(Exception):
    """Base of everything the engine raises on purpose.

    Args:
        message: What failed, where, what was got and expected, what to do.
        slug: Heading of the entry in docs/errors.md.
    """

    slug = "spmd-error"

    def __init__(self, message: str, slug: str | None = None) -> None:
        self.slug = slug or self.slug
        super().__init__(f"{message} [{self.slug}]")


class UsageError(SpmdError, ValueError):
    """The caller passed something that cannot work."""

    slug = "usage"


class StepArgumentsError(SpmdError, AssertionError):
    """The step got no module, several modules or several optimizers.

    Subclasses AssertionError because the retired prototype raised that.
    """

    slug = "step-arguments"


class UnknownStyleError(SpmdError, RuntimeError):
    """`DataParallel` was asked for a style it does not have (a RuntimeError upstream)."""

    slug = "unknown-parallel-style"


class CaptureError(SpmdError, RuntimeError):
    """The step cannot be captured as one graph; `location` is the user's source line.

    Args:
        message: Why, with the remedy.
        location: "file:line" of the user's code, if known.
        slug: Heading of the entry in docs/errors.md.
    """

    slug = "capture"

    def __init__(self, message: str, location: str | None = None, slug: str | None = None) -> None:
        self.location = location
        super().__init__(f"{location}: {message}" if location else message, slug)


class OtherRankError(SpmdError, RuntimeError):
    """Another rank failed before the step ran; its own error says why."""

    slug = "other-rank"


class LayoutError(SpmdError, ValueError):
    """A layout does not fit the tensor or the mesh."""

    slug = "layout"


class StrictFallbackError(SpmdError, RuntimeError):
    """`strict=True` and an operator had to be gathered and replicated."""

    slug = "strict-fallback"


class InternalError(SpmdError, RuntimeError):
    """A promise inside the engine is broken; please report it."""

    slug = "internal"


class SizeChanged(Exception):
    """A value that the graph was specialised on is another one in this call.

    Raised while the local graph runs, on every rank at the same node, before anything is
    written back; the compiled step answers with another capture.

    Args:
        what: The guarded operator or expression.
        expected: The value at capture.
        actual: The value now.
    """

    def __init__(self, what: str, expected: object, actual: object) -> None:
        self.what, self.expected, self.actual = what, expected, actual
        super().__init__(f"{what}: captured with {expected}, now {actual}")
