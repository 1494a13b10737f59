"""The record of one run: what every report is a view of. Torch-free.

Floats round-trip; NaN and infinities are written as strings. Keys that this version does
not know are kept in `unknown` and written back; a newer major version is refused.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from spmd_verify.errors import RecordError, UsageError
from spmd_verify.garbage import without_collections
from spmd_verify.plain_structs import NON_FINITE, from_plain, to_plain

# 1.0: first version.
# 1.1: `ties` of a cell.
# 1.2: `gate` of a cell.
SCHEMA_VERSION: Final = "1.2"
# Bytes up to which a record is indented: nobody reads 100,000 rows, and programs read them sooner.
_READABLE: Final = 8_000_000
# What the root module is called in names of its outputs.
ROOT: Final = "model"


class Cause(msgspec.Struct, kw_only=True):
    """Why a tensor differs: `verdicts.md` part 7.

    Attributes:
        kind: One of the words of that part; `unexplained` where nothing fits.
        text: One sentence.
        residual: What the explanation leaves, as a multiple of the noise; None where the
            cause is no fit (an order, a missing tensor, another run).
        axis: Mesh axis concerned, if one is.
        factor: Fitted factor, if there is one.
        ranks: Ranks concerned.
        tensors: Tensors concerned.
        remedy: What to change, if known.
    """

    kind: str
    text: str
    residual: float | None = None
    axis: str | None = None
    factor: float | None = None
    ranks: list[int] = []
    tensors: list[str] = []
    remedy: str | None = None
    unknown: dict[str, Any] = {}


class WorstElement(msgspec.Struct, kw_only=True):
    """The element of a tensor that differs most; `index` is global."""

    index: list[int]
    actual: float
    expected: float
    unknown: dict[str, Any] = {}


class Row(msgspec.Struct, kw_only=True):
    """One tensor at one stage of one step.

    `error` and `noise` are absolute norms, `ratio` is error / noise; all global.
    """

    name: str
    stage: str
    step: int
    verdict: str
    aliases: list[str] = []
    run: str = "free"
    shape: list[int] = []
    dtype: str = ""
    layout: str = ""
    ranks: list[int] = []
    error: float | None = None
    noise: float | None = None
    ratio: float | None = None
    max_ulp: int | None = None
    worst: WorstElement | None = None
    cause: Cause | None = None
    downstream_of: str | None = None
    unknown: dict[str, Any] = {}


class FirstDivergence(msgspec.Struct, kw_only=True):
    """The smallest (step, stage, position) that differs.

    Attributes:
        step: From 0.
        stage: One of the stage identifiers.
        tensor: Its name.
        operator: First differing operator, for styles that keep the correspondence.
        source: The user's source line of that operator.
        modules: For eager styles, the smallest modules that contain the fault, found by teacher
            forcing; empty where none does or none was looked for.
        located: What teacher forcing says, in one line.
    """

    step: int
    stage: str
    tensor: str
    operator: str | None = None
    source: str | None = None
    modules: list[str] = []
    located: str | None = None
    unknown: dict[str, Any] = {}


class WorstTensor(msgspec.Struct, kw_only=True):
    """The row of a cell with the largest ratio."""

    tensor: str
    stage: str
    step: int
    error: float
    noise: float
    ratio: float
    unknown: dict[str, Any] = {}


class Exercised(msgspec.Struct, kw_only=True):
    """How many of the rows that should carry signal did."""

    n: int
    of: int
    unknown: dict[str, Any] = {}


class Tie(msgspec.Struct, kw_only=True):
    """A decision that rounding takes: `verdicts.md` part 6.

    Attributes:
        operator: What decides, `topk`.
        source: `file:line` of the user's code, `backward` where it is none of it.
        step: From 0.
        run: `free` or `anchored`.
        margin: How far the values decided between were apart, in the reference.
        noise: The noise of the row of values that it decides in; absolute, as the margin.
        rows: How many rows there were decided otherwise; margin and noise are the first one's.
    """

    operator: str
    source: str
    step: int
    run: str
    margin: float
    noise: float
    rows: int = 1
    unknown: dict[str, Any] = {}


class Gate(msgspec.Struct, kw_only=True):
    """What the run's settings and waivers made of a cell's verdict.

    Attributes:
        fails: Whether the cell makes the run exit with 1 or 3.
        waived: Reason of the waiver or known failure that lets it pass; None without one.
        until: Last day of that, `2027-01-31`; None for no end.
    """

    fails: bool
    waived: str | None = None
    until: str | None = None
    unknown: dict[str, Any] = {}


class Cell(msgspec.Struct, kw_only=True):
    """One case under one style on one mesh in one dtype.

    `ties` are near ties that the style decided otherwise than the reference; `gate` is None where
    no gate has judged the cell.
    """

    case: str
    style: str
    mesh: str
    dtype: str
    world_size: int
    runner: str
    verdict: str
    message: str = ""
    cause: Cause | None = None
    first_divergence: FirstDivergence | None = None
    worst: WorstTensor | None = None
    counts: dict[str, int] = {}
    exercised: Exercised | None = None
    fallbacks: dict[str, int] = {}
    collectives: dict[str, int] = {}
    skipped_reason: str | None = None
    undetermined_reason: str | None = None
    duration_seconds: float = 0.0
    log: str | None = None
    ties: list[Tie] = []
    gate: Gate | None = None
    tensors: list[Row] = []
    unknown: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """Return the name that `-k` and messages use."""
        return f"{self.case}/{self.style}"

    @property
    def reason(self) -> str:
        """Return why the verdict is no more than it is, else what there is to say of the cell."""
        doubt = self.undetermined_reason if self.verdict == "undetermined" else None
        return self.skipped_reason or doubt or self.message


class CaseInfo(msgspec.Struct, kw_only=True):
    """What was judged."""

    path: str
    source_hash: str
    seed: int
    unknown: dict[str, Any] = {}


class ExactInfo(msgspec.Struct, kw_only=True):
    """What exact mode proved of a case: docs/design.md part 3.8.

    Attributes:
        bits: The most that any sum needed.
        precision: p of the case's dtype.
        where: The operator and line that needed them.
        surrogates: "operator at file:line" of what exact operators stood in for.
        doubts: What could not be proved, by operator and line; empty for an exact case.
        draws: Per step, which draw of state and inputs was taken: the first without doubt.
    """

    bits: int
    precision: int
    where: str
    surrogates: list[str] = []
    doubts: list[str] = []
    draws: list[int] = []


class Record(msgspec.Struct, kw_only=True):
    """Everything one run found."""

    schema_version: str = SCHEMA_VERSION
    tool: str = ""
    command: list[str] = []
    exit_code: int = 0
    environment: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    case: CaseInfo | None = None
    discovered: dict[str, str] = {}
    cells: list[Cell] = []
    unknown: dict[str, Any] = {}


def encode(record: Record) -> bytes:
    """Return a record as JSON, NaN and infinities as strings; indented where people may read it."""
    with without_collections():
        text = msgspec.json.encode(to_plain(record))
    return (msgspec.json.format(text, indent=1) if len(text) < _READABLE else text) + b"\n"


def decode(text: bytes | str, where: str = "the record") -> Record:
    """Read a record of this or an older version.

    Args:
        text: JSON.
        where: Path for messages.

    Raises:
        RecordError: `not-a-record`, `record-too-new`.
    """
    with without_collections():
        try:
            plain = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _not_a_record(where, str(error)) from error
        if not isinstance(plain, dict) or "schema_version" not in plain:
            raise _not_a_record(where, "no schema_version")
        _check_version(str(plain["schema_version"]), where)
        try:
            return from_plain(Record, plain)
        except msgspec.ValidationError as error:
            raise _not_a_record(where, str(error)) from error


def read(path: str) -> Record:
    """Read a record from a file.

    Raises:
        UsageError: `record-unreadable`.
        RecordError: `not-a-record`, `record-too-new`.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(
            f"Cannot read the record: {path!r}. Got {getattr(error, 'strerror', None) or error}. "
            f"Pass the file that --report json=PATH wrote",
            slug="record-unreadable",
        ) from error
    return decode(content, path)


def _check_version(version: str, where: str) -> None:
    """Refuse a version that is none, and a newer major one."""
    major = version.partition(".")[0]
    if not re.fullmatch("[0-9]{1,9}", major):
        raise _not_a_record(where, f"schema_version {version[:40]!r}")
    if int(major) > int(SCHEMA_VERSION.partition(".")[0]):
        raise RecordError(
            f"The record is too new: {where}. Got schema {version}, this version reads up to "
            f"{SCHEMA_VERSION}. Install the spmd-verify that wrote it, or a newer one",
            slug="record-too-new",
        )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record as it is written."""
    schema = msgspec.json.schema(Record)
    schema["title"] = "spmd-verify record"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for definition in schema["$defs"].values():
        definition.get("properties", {}).pop("unknown", None)
        definition["additionalProperties"] = True
    adjusted: dict[str, Any] = _with_non_finite(schema)
    return adjusted


def _not_a_record(where: str, why: str) -> RecordError:
    return RecordError(
        f"Not a record of spmd-verify: {where}. Got {why}. Pass the file that --report "
        f"json=PATH wrote",
        slug="not-a-record",
    )


def _with_non_finite(schema: Any) -> Any:
    """Let every number of a schema also be one of the three strings."""
    if isinstance(schema, dict):
        if schema.get("type") == "number":
            rest = {key: value for key, value in schema.items() if key != "type"}
            return {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}], **rest}
        return {key: _with_non_finite(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_with_non_finite(member) for member in schema]
    return schema


class _Callable(ModuleType):
    """This module, which is also the function `spmd_verify.record` of the public interface.

    A submodule is an attribute of its package as soon as anything imports it; the function
    beside it must be the same object.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Record a training script; see `spmd_verify.recorder.record`."""
        return import_module("spmd_verify.recorder").record(*args, **options)


sys.modules[__name__].__class__ = _Callable
