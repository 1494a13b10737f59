"""The whole job: one record from cases, styles and ranks, whatever the ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_verify import run
from spmd_verify.errors import CaseError, ReferenceRunError, UsageError
from spmd_verify.exit_codes import PASSED, decide
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.options import Options
from spmd_verify.record import Cell, Record, decode

pytestmark = pytest.mark.dist

CaseWriter = Callable[..., str]

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()
"""


class Events:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.starts: list[str] = []
        self.cells: list[Cell] = []
        self.on_start: Callable[[str], None] = lambda _: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def planned(self, count: int) -> None:
        pass

    def started(self, what: str) -> None:
        self.starts.append(what)
        self.on_start(what)

    def finished(self, cell: Cell) -> None:
        self.cells.append(cell)

    def alive(self, style: str, step: int, rank: int) -> None:
        pass


@pytest.fixture
def model(write_case: CaseWriter) -> str:
    """Return the path of a two-layer model."""
    return write_case(MODEL)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Return a function that judges a model under styles of `standin.py`."""

    def judge(*targets: str, names: str, events: Events | None = None, **options) -> Record:
        chosen = tuple(f"standin:{name}" for name in names.split())
        monkeypatch.setattr(run, "select", lambda *_: chosen)
        settings = {"steps": 2, "timeout_seconds": 60.0, **options}
        return run.verify(Options(targets=targets, **settings), events or Events())

    return judge


def verdicts(record: Record) -> list[str]:
    """Return the cells' verdicts in order."""
    return [cell.verdict for cell in record.cells]


def test_right_and_wrong_styles_are_told_apart(model: str, stand_ins) -> None:
    record = stand_ins(model, names="RIGHT SCALED UNREDUCED")

    assert verdicts(record) == ["rounding", "mismatch", "mismatch"]
    scaled = record.cells[1]
    assert scaled.first_divergence is not None
    assert scaled.cause is not None
    assert (scaled.first_divergence.step, scaled.first_divergence.stage) == (0, "gradients")
    assert scaled.cause.kind == "factor"
    assert scaled.cause.factor == pytest.approx(1.0001, rel=1e-6)
    assert {row.run for row in record.cells[0].tensors} == {"free", "anchored"}


def test_a_rank_that_fails_costs_its_cell_only(model: str, stand_ins, tmp_path: Path) -> None:
    record = stand_ins(
        model, names="RIGHT KILLED RAISING REFUSING RIGHT", log_dir=str(tmp_path / "logs")
    )

    assert verdicts(record) == ["rounding", "error", "error", "unsupported", "rounding"]
    killed, raising, refusing = record.cells[1:4]
    assert "Rank 1 of 2" in killed.message
    assert "signal 9" in killed.message
    assert "step 1 of the free run" in killed.message
    assert killed.log == str(tmp_path / "logs" / "rank1.log")
    assert "Rank 1 of 2 raised ValueError" in raising.message
    assert "standin.py:" in raising.message
    assert "planted in step 1" in Path(str(raising.log)).read_text()
    assert refusing.skipped_reason == "an operator has no rule: model.py:7"


def test_a_hanging_rank_costs_its_cell_only(model: str, stand_ins) -> None:
    record = stand_ins(model, names="HANGING REFUSING", timeout_seconds=5.0)

    assert verdicts(record) == ["error", "unsupported"]
    assert "Rank 1 of 2 gave no answer within 5" in record.cells[0].message
    assert "in _hang" in record.cells[0].message
    assert os.path.exists(str(record.cells[0].log))


def test_finished_cells_are_on_disk_while_others_run(model: str, stand_ins, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    found: list[int] = []
    events = Events()

    def look(what: str) -> None:
        if "standin" in what:
            found.append(len(decode(path.read_bytes()).cells) if path.exists() else 0)

    events.on_start = look
    stand_ins(model, names="RIGHT REFUSING RIGHT", events=events, reports=(("json", str(path)),))

    assert found == [0, 1, 2]
    assert len(decode(path.read_bytes()).cells) == 3


def test_stop_at_first_leaves_the_rest_out(model: str, stand_ins) -> None:
    assert verdicts(stand_ins(model, names="SCALED RIGHT", stop_at_first=True)) == ["mismatch"]


def test_the_record_says_what_was_run(model: str, stand_ins) -> None:
    record = stand_ins(model, names="REFUSING", seed=5)

    assert record.case is not None
    assert (record.case.path, record.case.seed) == (model, 5)
    assert record.discovered["loss"].startswith("loss, line")
    assert record.settings["steps"] == 2
    assert "torch" in record.environment
    assert record.cells[0].mesh == "dp=2"


def test_a_wrong_case_alone_is_an_error(write_case: CaseWriter, stand_ins) -> None:
    with pytest.raises(CaseError) as caught:
        stand_ins(write_case("def get_inputs():\n    return 1\n"), names="RIGHT")

    assert caught.value.slug == "no-module"


def test_a_model_that_raises_is_told_before_any_rank_starts(
    write_case: CaseWriter, stand_ins
) -> None:
    events = Events()
    broken = MODEL.replace("self.second(", "self.third(")
    with pytest.raises(ReferenceRunError) as caught:
        stand_ins(write_case(broken), names="RIGHT", events=events)

    assert "third" in f"{caught.value} {caught.value.detail}"
    assert len(events.starts) == 1


def test_a_wrong_case_among_others_costs_its_own_cells(
    model: str, write_case: CaseWriter, stand_ins
) -> None:
    wrong = write_case("def get_inputs():\n    return 1\n", name="wrong.py")
    record = stand_ins(wrong, model, names="RIGHT")

    assert verdicts(record) == ["error", "rounding"]
    assert "[no-module]" in record.cells[0].message
    assert record.discovered[f"{model}: loss"].startswith("loss, line")


def test_a_mesh_larger_than_allowed_is_refused(model: str) -> None:
    with pytest.raises(UsageError) as caught:
        run.verify(Options(targets=(model,), mesh=MeshSpec(((None, 64),))), Events())

    assert caught.value.slug == "mesh-too-large"


def test_the_controller_imports_no_torch() -> None:
    check = "import sys, spmd_verify.run; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


HANGS_ON_RANKS = MODEL.replace(
    "return self.second",
    """if torch.distributed.is_initialized():
            import os, pathlib, time
            pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
            time.sleep(600)
        return self.second""",
)


def test_a_long_temporary_folder_is_no_obstacle(write_case: CaseWriter, tmp_path: Path) -> None:
    # A socket's path has at most 107 characters.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()

    done = subprocess.run(
        [sys.executable, "-m", "spmd_verify", write_case(MODEL), "--styles", "replicate"],
        env={**os.environ, "TMPDIR": str(folder)},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_stopped_command(
    write_case: CaseWriter, tmp_path: Path, number: signal.Signals
) -> None:
    pids, folder = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    folder.mkdir()
    said = tmp_path / "said"
    words = ["-m", "spmd_verify", write_case(HANGS_ON_RANKS), "--styles", "replicate"]
    with said.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "PIDS": str(pids), "TMPDIR": str(folder)},
            cwd=Path(__file__).parent.parent,
            stderr=output,
            # A shell's background job ignores SIGINT and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    deadline = time.monotonic() + 90
    while len(list(pids.iterdir())) < 2:
        assert command.poll() is None, f"exit {command.poll()}:\n{said.read_text()}"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(command.pid)
    assert {int(entry.name) for entry in pids.iterdir()} <= set(family)
    command.send_signal(number)
    code = command.wait(timeout=20)

    deadline = time.monotonic() + 10
    while alive := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)
    if number == signal.SIGINT:
        assert code == 130
        assert list(folder.glob("spmd-verify-*")) == []


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`."""
    children = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and parent_of(int(entry.name)) == pid
    ]
    return children + [below for child in children for below in descendants(child)]


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """Say whether a process exists and is not a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def test_an_eval_forward_that_fails_costs_its_stage_only(write_case: CaseWriter) -> None:
    options = Options(
        targets=(write_case(EVAL_FAILS),), styles=("replicate", "fully_shard"), steps=2,
        runner="lockstep",
    )  # fmt: skip
    record = run.verify(options, Events())

    assert {cell.verdict for cell in record.cells} == {"rounding"}
    assert "eval_outputs" not in {row.stage for row in record.cells[0].tensors}


EVAL_FAILS = MODEL.replace(
    "return self.second",
    """if not self.training:
            raise ValueError("eval is broken")
        return self.second""",
)


IS_OTHER_ON_RANKS = MODEL.replace(
    "return self.second(", "return (1.0 + torch.distributed.is_initialized()) * self.second("
)
LEAVES_A_THREAD = MODEL.replace(
    "class Model",
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n\n\n"
    "class Model",
    1,
)


@pytest.mark.parametrize(
    ("text", "verdict", "is_ahead"),
    [
        (MODEL, "rounding", True),
        (IS_OTHER_ON_RANKS, "mismatch", False),
        (LEAVES_A_THREAD, "rounding", False),
    ],
)
def test_ranks_capture_only_what_nobody_could_capture_before(
    write_case: CaseWriter, text: str, verdict: str, is_ahead: bool
) -> None:
    targets = (write_case(text),)
    record = run.verify(Options(targets=targets, styles=("replicate",), steps=3), Events())

    assert verdicts(record) == [verdict]
    assert (record.cells[0].unknown["captures"] == 0) == is_ahead


@pytest.mark.parametrize("runner", ["processes", "lockstep"])
def test_the_engines_styles_pass(model: str, runner: str) -> None:
    options = Options(targets=(model,), steps=3, runner=runner, timeout_seconds=120.0)
    record = run.verify(options, Events())

    assert [(cell.style, cell.verdict) for cell in record.cells] == [
        ("replicate", "rounding"),
        ("fully_shard", "rounding"),
        ("default", "rounding"),
        ("dtensor_expand", "rounding"),
        ("spmd_hybrid", "unsupported"),  # two ranks form no mesh of two axes
        ("spmd_tp", "rounding"),
        ("spmd_sp", "rounding"),
        ("spmd_dp_tp", "unsupported"),
    ]
    assert decide(record.cells) == PASSED
    record.cells = [cell for cell in record.cells if cell.verdict != "unsupported"]
    assert {cell.runner for cell in record.cells} == {runner}
    for cell in record.cells:
        shown = {row.stage for row in cell.tensors if row.verdict != "not_exercised"}
        assert shown >= {
            "inputs",
            "initial_state",
            "module_outputs",
            "loss",
            "gradients",
            "optimizer_state",
            "parameters",
            "eval_outputs",
        }


def test_two_runs_at_once_do_not_meet(model: str) -> None:
    command = [sys.executable, "-m", "spmd_verify", model, "--styles", "replicate", "--steps", "1"]
    both = [
        subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE)
        for _ in range(2)
    ]

    for process in both:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert b"rounding" in output
