"""What jobs are asked and what they answer, as msgpack structures. Torch-free.

A case crosses processes as its address and settings only; every process loads it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from spmd_verify.planting.certificate import Sensitivity
from spmd_verify.planting.faults import Fault, Watched
from spmd_verify.record import ExactInfo, Tie
from spmd_verify.runner.failures import Failure

_T = TypeVar("_T")

LOAD_JOB = "spmd_verify.runner.jobs:describe_case"
REFERENCE_JOB = "spmd_verify.runner.jobs:write_reference"
CAPTURE = "spmd_verify.runner.ahead:capture"
CELL_JOB = "spmd_verify.runner.jobs:run_cell"
JUDGE_JOB = "spmd_verify.runner.jobs:judge_cell"
EXAMINE_JOB = "spmd_verify.examination.examine:examine_cell"
TIES_JOB = "spmd_verify.examination.near_ties:find_ties"
LOCATE_JOB = "spmd_verify.runner.jobs:locate_operator"
FEEDING_JOB = "spmd_verify.examination.feeding:plan_feeding"
SURVEY_JOB = "spmd_verify.runner.survey:survey"
CHECKUP_JOB = "spmd_verify.runner.checkup:sum_ranks"


class CaseSpec(msgspec.Struct, frozen=True):
    """Everything `case.load_case` needs.

    Attributes:
        address: As typed.
        dtype: `float32`, `float64` or `bfloat16`.
        seed: The base seed.
        steps: Training steps per run.
        overrides: See `case.load_case`.
    """

    address: str
    dtype: str
    seed: int
    steps: int
    overrides: dict[str, str]


class CaseReport(msgspec.Struct, frozen=True):
    """What loading a case told.

    Attributes:
        path: The user's file, or the address where there is none.
        source_hash: SHA-256 of the case file.
        user_styles: Names of the file's own styles.
        discovered: What was found for every hook.
        environment: Versions and machine, for the record.
        meshes: What `mesh_NAME()` says, by style.
        overrides: What loading decided: put over the case's overrides from now on.
        engine_overrides: The same where only the engine's styles run.
        setups: Styles whose `setup_NAME` builds the optimizer.
    """

    path: str
    source_hash: str
    user_styles: list[str]
    discovered: dict[str, str]
    environment: dict[str, str]
    meshes: dict[str, dict[str, int]] = {}
    overrides: dict[str, str] = {}
    engine_overrides: dict[str, str] = {}
    setups: list[str] = []


class ReferenceSpec(msgspec.Struct, frozen=True):
    """Make the reference of a case and write it to a store.

    Attributes:
        case: The case.
        store_path: Folder to write to.
        cache_path: Folder of the references of earlier runs; empty to use none.
    """

    case: CaseSpec
    store_path: str
    cache_path: str = ""


class ReferenceReport(msgspec.Struct, frozen=True):
    """What making a reference told.

    Attributes:
        notes: What a reader should know: runs dropped, float64 absent, islands.
        is_sgd: Whether the case trains with `torch.optim.SGD` only.
        is_stepped: Whether a step steps the optimizer that the case builds.
        exact: What exact mode proved; None in other modes.
        remarks: What is said of this run only, such as that the cache was used.
        seconds: Wall time by part, see `stopwatch`.
        cpu_seconds: Processor time by part.
    """

    notes: list[str]
    is_sgd: bool = False
    is_stepped: bool = True
    exact: ExactInfo | None = None
    remarks: list[str] = []
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}


class Feeding(msgspec.Struct, frozen=True):
    """Run one step of a cell and feed the reference in at boundaries of modules.

    Attributes:
        run: `free` or `anchored`: the run whose step is run.
        step: Which.
        folder: Where each rank's boundaries are written, and what may be fed is read from.
        direction: `values` or `gradients`.
        fed: Keys of the boundaries to feed, see `boundaries`; empty to watch only.
        is_watching: Whether to write what was seen into the folder.
    """

    run: str
    step: int
    folder: str
    direction: str
    fed: list[str] = []
    is_watching: bool = False


class Resume(msgspec.Struct, frozen=True):
    """Run a cell to the step before its last, save it, load it into a fresh build, and go on.

    Attributes:
        way: How it is loaded, see `styles.saving`; empty for the first way in memory.
        folder: Where the checkpoint is, or is written to; empty for none.
        is_saving: Whether to run the steps and save; else the checkpoint is there.
    """

    way: str
    folder: str
    is_saving: bool


class CellSpec(msgspec.Struct, frozen=True):
    """One cell: a case under one style on one mesh.

    Attributes:
        case: The case.
        style: A name that `styles.find` knows.
        mesh: The mesh as records hold it, `dp=2,tp=2`.
        axes: Mesh axes in mesh order as the style sees them, `{name: ranks}`.
        parts: The axes that were asked for, where the style sees them as one.
        store_path: Where the reference is.
        is_lockstep: Whether one process holds all ranks.
        timeout_seconds: Time limit of the cell.
        fault: Planted into the style, for certificates.
        dump_path: Folder to dump what ranks hold into; empty for none.
        last_step: The last step to run, -1 for the case's.
        ties_path: File of near ties that are decided as the reference did; empty for none.
        feeding: Run one step only, with the reference fed in.
        resume: Run the last step only, after loading what was saved.
    """

    case: CaseSpec
    style: str
    mesh: str
    axes: dict[str, int]
    store_path: str
    is_lockstep: bool
    timeout_seconds: float
    fault: Fault | None = None
    dump_path: str = ""
    last_step: int = -1
    ties_path: str = ""
    feeding: Feeding | None = None
    resume: Resume | None = None
    parts: dict[str, int] = {}

    @property
    def num_ranks(self) -> int:
        """World size of the cell's mesh."""
        return math.prod(self.axes.values())


class CellEvidence(msgspec.Struct, frozen=True):
    """What the processes of a cell found.

    Attributes:
        parts: One encoded report per process: per rank, or one for all under lockstep.
        seconds: Wall time of the cell.
        start_seconds: How much of it was waiting until the processes were there: for what was
            captured before they were forked, above all.
    """

    parts: list[bytes]
    seconds: float
    start_seconds: float = 0.0


class CellReport(msgspec.Struct, frozen=True):
    """What one process of a cell found.

    Attributes:
        statistics: msgpack of `list[compare.Statistics]`.
        fallbacks: Operators that were gathered and replicated, with how often.
        collectives: Collectives of one step by kind.
        captures: How often the step was captured.
        notes: What the report says besides, such as why an eval forward failed.
        watched: What planting a fault saw.
        facts: What examinations ask of the style, such as its wrappers; plain values.
        seconds: Wall time by part, see `stopwatch`.
        cpu_seconds: Processor time by part.
        flipped: Which near ties this process had decided otherwise, by their position.
    """

    statistics: bytes
    fallbacks: dict[str, int]
    collectives: dict[str, int]
    captures: int
    notes: list[str]
    watched: Watched | None = None
    facts: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    flipped: list[int] = []


class JudgeRequest(msgspec.Struct, frozen=True):
    """Judge a cell by what its processes found; answered by one encoded `record.Cell`."""

    cell: CellSpec
    parts: list[bytes]
    seconds: float


class Survey(msgspec.Struct, frozen=True):
    """What a reference has to plant faults in.

    Attributes:
        parameters: Trainable ones that move in the first step.
        buffers: Floating ones that it writes.
        unmoved: Those of both that move by no more than their noise.
        sensitivities: Of every gradient.
    """

    parameters: list[str]
    buffers: list[str]
    unmoved: list[str]
    sensitivities: list[Sensitivity]


class TiesRequest(msgspec.Struct, frozen=True):
    """Find the near ties of a case's reference; answered by a `TiesReport`.

    Attributes:
        case: The case.
        store_path: Where its reference is.
        path: File to write them to.
    """

    case: CaseSpec
    store_path: str
    path: str


class TiesReport(msgspec.Struct, frozen=True):
    """The near ties that were written, in order."""

    ties: list[Tie]


class ExamineRequest(msgspec.Struct, frozen=True):
    """Say why a cell fails, from a dump of it; answered by an `ExamineReport`.

    Attributes:
        cell: The cell as it was run for the dump.
        judged: The encoded `record.Cell` of its judgement.
        experiments: What other runs told, by name: whether the cell passes in them.
    """

    cell: CellSpec
    judged: bytes
    facts: dict[str, Any]
    experiments: dict[str, bool | None]


class ExamineReport(msgspec.Struct, frozen=True):
    """What an examination found.

    Attributes:
        judged: The encoded `record.Cell` with explained rows, first divergence and cause.
        wanted: Name of the experiment that would tell more; empty for none.
    """

    judged: bytes
    wanted: str = ""


class LocateRequest(msgspec.Struct, frozen=True):
    """Find the operator that a style computes differently in one step of the free run."""

    cell: CellSpec
    step: int


class LocateReport(msgspec.Struct, frozen=True):
    """Name and source line of that operator; None where none was found.

    Attributes:
        operator: For example `aten.mm.default`.
        source: `file:line` of the user's code it came from.
    """

    operator: str | None = None
    source: str | None = None


class FeedingRequest(msgspec.Struct, frozen=True):
    """Say what may be fed in at which boundary; answered by a `FeedingPlan`.

    Attributes:
        cell: The cell as it was run to watch its boundaries.
    """

    cell: CellSpec


class Boundary(msgspec.Struct, frozen=True):
    """One boundary of a module, as the failing step met it.

    Attributes:
        key: See `boundaries`.
        finding: `right`; `summand` where a sum over ranks is right; `wrong`; `doubtful` where
            it may be either, of something wrong; `unknown` where nobody can say which part of the
            reference it should be.
        tolerance: The largest norm of a rank's deviation that is noise.
        is_repeated: It has the same values as the one before it in the direction of flow.
    """

    key: str
    finding: str
    tolerance: float
    is_repeated: bool = False

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.key.partition("|")[0]

    @property
    def is_input(self) -> bool:
        """Whether the tensor enters the module."""
        return self.key.split("|")[1] == "in"


class FeedingPlan(msgspec.Struct, frozen=True):
    """What may be fed in.

    Attributes:
        boundaries: In forward order; what neither side can be held against is left out.
        scales: Of gradients, by rank: what this rank's are a multiple of the reference's by
            the style's own convention (the ranks of a mean that is taken later).
        problem: Why nothing can be fed in; empty otherwise.
    """

    boundaries: list[Boundary]
    scales: list[float] = []
    problem: str = ""


OnNote = Callable[[int, str], None]


class Runner(Protocol):
    """Runs cells; nothing above this knows whether ranks are processes."""

    def run_cell(self, spec: CellSpec, on_note: OnNote | None = None) -> CellEvidence | Failure:
        """Run one cell; a rank that fails costs the cell and nothing else."""
        ...

    def stop(self) -> None:
        """End every process of the runner."""
        ...


def encode(value: Any) -> bytes:
    """Return a spec or an answer as msgpack bytes."""
    return msgspec.msgpack.encode(value)


def decode(message: bytes, kind: type[_T]) -> _T:
    """Read what `encode` wrote."""
    return msgspec.msgpack.decode(message, type=kind)
