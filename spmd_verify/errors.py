"""Every exception the checker raises on purpose. Torch-free; crosses process boundaries.

A message has the form `<what failed>: <where>. Got <x>, expected <y>. <Why>. <What to do>.`
and ends in the slug of its heading in `docs/errors.md`. A difference between candidate
and reference is no exception: it is a verdict in the record.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class SpmdVerifyError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: The text without the slug.
        slug: The heading in `docs/errors.md`.
        detail: Longer text shown below the message, such as the user's own traceback; may
            be empty.
        fields: The values the message was made from, for callers that act on them.
        exit_code: What `spmd-verify` exits with when this reaches the command line.
    """

    exit_code: ClassVar[int] = 4

    def __init__(
        self,
        message: str,
        *,
        slug: str,
        detail: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep the parts and compose the text `message [slug]`."""
        super().__init__(message)
        self.message = message
        self.slug = slug
        self.detail = detail
        self.fields = dict(fields or {})

    def __str__(self) -> str:
        return f"{self.message} [{self.slug}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.slug, self.detail, self.fields)


class UsageError(SpmdVerifyError):
    """An option, a configuration value or an address is wrong: nothing is run, exit 2."""

    exit_code = 2


class CaseError(UsageError):
    """The case file or the model in it cannot be judged as it is, exit 2."""


class ReferenceRunError(CaseError):
    """The single-device run itself is unusable: raises, NaN, or differs from run to run."""


class Unsupported(SpmdVerifyError):
    """A style or the engine refuses this case: the cell's verdict is `unsupported`, exit 5."""

    exit_code = 5


class RankError(SpmdVerifyError):
    """A rank raised, died or hung: the cell's verdict is `error`, exit 3."""

    exit_code = 3


class RecordError(UsageError):
    """A record on disk cannot be read."""


class InternalError(SpmdVerifyError):
    """A promise between our own parts is broken, exit 4: please report."""


def _rebuild(
    kind: type[SpmdVerifyError], message: str, slug: str, detail: str, fields: dict[str, Any]
) -> SpmdVerifyError:
    """Make the same error again on the other side of a pipe."""
    return kind(message, slug=slug, detail=detail, fields=fields)


def choices_text(given: str, choices: Iterable[str], *, most: int = 10) -> str:
    """Say which names would have been right.

    Returns:
        All choices when there are at most `most`; else the nearest one to `given`, or
        the count when nothing is near.
    """
    names = list(choices)
    if not names:
        return "there are none"
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if len(names) <= most:
        return f"valid: {', '.join(names)}{hint}"
    return f"did you mean {near[0]!r}?" if near else f"{len(names)} names are valid"
