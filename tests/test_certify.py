"""Certificates: faults planted in a user's own run are caught, survivors fail the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_verify import cli
from spmd_verify.certify import certify
from spmd_verify.exit_codes import decide_certified
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.options import Options
from spmd_verify.planting import certificate as certificates
from spmd_verify.planting import plan
from spmd_verify.planting.certificate import (
    CAUGHT,
    EQUIVALENT,
    SURVIVED,
    Certificate,
    Sensitivity,
)
from spmd_verify.record import Cell, Record, decode, encode
from spmd_verify.reporters import certificates as report

CaseWriter = Callable[..., str]

MODEL = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()

def parallelize_by_hand(model, mesh):
    return model

def step_by_hand(model, optimizer, batch, mesh):
    value = loss(model(*batch))
    optimizer.zero_grad()
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= mesh.size()
    optimizer.step()
    return value

def parallelize_wrapped(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())

def parallelize_sharded(model, mesh):
    fully_shard(model, mesh=mesh)
"""

DROPOUT_AND_BUFFERS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()
"""


class Silent:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.starts: list[str] = []

    def note(self, text: str) -> None:
        pass

    def planned(self, count: int) -> None:
        pass

    def started(self, what: str) -> None:
        self.starts.append(what)

    def finished(self, cell: Cell) -> None:
        pass

    def alive(self, style: str, step: int, rank: int) -> None:
        pass


def certified(target: str, *styles: str, **options) -> Record:
    """Certify a case under some styles."""
    settings = {"steps": 2, "timeout_seconds": 120.0, **options}
    return certify(Options(targets=(target,), styles=styles, **settings), Silent())


def only(record: Record) -> Certificate:
    """Return the certificate of the only cell."""
    (cell,) = record.cells
    found = certificates.of(cell)
    assert found is not None, cell.message
    return found


def by_status(found: Certificate, status: str) -> list[tuple[str, str]]:
    """Return kind and place of the faults of a status."""
    return [(o.kind, o.fault) for o in found.outcomes if o.status == status]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("style", "collectives"), [("by_hand", 4), ("wrapped", 1), ("sharded", None)]
)
def test_every_fault_in_a_users_run_is_caught(
    write_case: CaseWriter, style: str, collectives: int | None
) -> None:
    """Hand-written, DistributedDataParallel's reducer and fully_shard, on real ranks."""
    record = certified(write_case(MODEL), style, faults=16)
    found = only(record)

    assert by_status(found, SURVIVED) == []
    assert found.kill_rate == 1.0
    assert {o.kind for o in found.outcomes if o.status == CAUGHT} == {
        "drop", "double", "rescale", "wrong_operation", "shift", "zero_rank", "stale"
    } - ({"double"} if style == "sharded" else set())  # fmt: skip
    assert {kind for kind, _ in by_status(found, EQUIVALENT)} == {"reseed"}
    assert found.collectives == (collectives or found.collectives)
    assert decide_certified(record.cells, strict=False, exit_zero=False) == 0
    if style == "by_hand":
        text = Path(record.cells[0].case).read_text().partition("dist.all_reduce(")[0]
        assert f"model.py:{text.count(chr(10)) + 1}" in found.outcomes[0].fault
        named = {o.kind for o in found.outcomes if o.is_named}
        assert named >= {"rescale", "double", "wrong_operation"}


@pytest.mark.dist
@pytest.mark.parametrize("runner", ["lockstep", "processes"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_every_fault_in_an_engine_style_is_caught(
    write_case: CaseWriter, style: str, runner: str
) -> None:
    """Dropout and running statistics make the last kinds mean something."""
    case = write_case(DROPOUT_AND_BUFFERS)
    found = only(certified(case, style, runner=runner, steps=1, faults=12))

    assert by_status(found, SURVIVED) == []
    caught = {kind for kind, _ in by_status(found, CAUGHT)}
    assert caught >= {"drop", "rescale", "zero_rank", "stale", "skip_buffer", "reseed"}


@pytest.mark.dist
def test_a_collective_over_one_rank_is_no_place_for_a_fault(write_case: CaseWriter) -> None:
    mesh = MeshSpec((("dp", 1),))
    found = only(certified(write_case(MODEL), "by_hand", mesh=mesh, steps=1))

    assert {o.kind for o in found.outcomes} == {"stale", "reseed"}
    assert by_status(found, EQUIVALENT) == [("reseed", "rank 0")]


EQUAL_ROWS = MODEL.replace("torch.randn(8, 6)", "torch.ones(8, 6)").replace(
    "dist.all_reduce(parameter.grad, group=mesh.get_group())",
    "dist.all_reduce(parameter.grad, group=mesh.get_group(), op=dist.ReduceOp.MAX)",
).replace("parameter.grad /= mesh.size()", "pass")  # fmt: skip


@pytest.mark.dist
def test_a_fault_that_changes_no_number_is_equivalent_and_not_counted(
    write_case: CaseWriter,
) -> None:
    """All ranks send the same, and the largest of equal things is each of them."""
    found = only(certified(write_case(EQUAL_ROWS), "by_hand", steps=1, faults=40))

    assert [kind for kind, _ in by_status(found, EQUIVALENT)].count("drop") == 4
    assert by_status(found, SURVIVED) == []
    assert found.counted == len(found.outcomes) - found.count(EQUIVALENT)


@pytest.mark.dist
def test_a_survivor_fails_the_command_and_is_shown(
    write_case: CaseWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    """A payload times 1 + 1e-7 changes bits and stays below the limit."""
    monkeypatch.setitem(plan.RESCALED, "float32", 1.0 + 1.5e-7)
    monkeypatch.chdir(tmp_path)
    case = write_case(MODEL)
    words = f"certify {case} --styles by_hand --steps 1 --faults 4 -q --report json=out.json"

    assert cli.main(words.split()) == 1
    out = capsys.readouterr().out
    assert "survived: rescale: all_reduce" in out
    record = decode(Path("out.json").read_bytes())
    assert record.exit_code == 1
    found = only(record)
    assert [kind for kind, _ in by_status(found, SURVIVED)] == ["rescale"]
    assert found.kill_rate == 0.75
    assert json.loads(Path("out.json").read_bytes())["cells"][0]["certificate"]["summary"] == {
        "counted": 4,
        "caught": 3,
        "survived": 1,
        "equivalent": 0,
        "named": found.named,
        "median_relative": found.median,
        "worst_relative": found.worst.relative,
        "worst_tensor": found.worst.tensor,
    }
    assert cli.main([*words.split(), "--exit-zero"]) == 0


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("example", ["mlp", "transformer"])
def test_gradients_are_seen_to_be_off_by_very_little(
    root: Path, example: str, dtype: str, most: float
) -> None:
    path = str(root / f"examples/{example}.py")
    found = only(certified(path, "replicate", runner="lockstep", dtype=dtype, faults=1, steps=1))

    assert found.median is not None
    assert found.median <= most
    assert found.check is not None
    assert found.check.of == sum(s.relative is not None for s in found.sensitivities) > 5
    assert found.check.seen_above == found.check.of
    assert found.check.seen_below == 0


@pytest.mark.dist
def test_a_cell_that_fails_gets_no_certificate(write_case: CaseWriter) -> None:
    """Nothing is planted where the run itself is wrong."""
    wrong = MODEL.replace("parameter.grad /= mesh.size()", "pass")
    record = certified(write_case(wrong), "by_hand", steps=1)

    assert record.cells[0].verdict == "mismatch"
    assert certificates.of(record.cells[0]) is None
    assert decide_certified(record.cells, strict=False, exit_zero=False) == 1
    assert "first divergence" in report.render(record)


def _cell(verdict: str, *statuses: str) -> Cell:
    """Return a cell whose certificate has faults of these statuses."""
    cell = Cell(
        case="m.py",
        style="mine",
        mesh="dp=2",
        dtype="float32",
        world_size=2,
        runner="processes",
        verdict=verdict,
    )
    outcomes = [
        certificates.Outcome("drop", f"all_reduce {i} over dp", status, "mismatch")
        for i, status in enumerate(statuses)
    ]
    if statuses:
        found = Certificate(outcomes, [Sensitivity("w", 1e-6, 0), Sensitivity("b", None)])
        certificates.put(cell, found)
    return cell


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        (_cell("rounding", CAUGHT, EQUIVALENT), 0),
        (_cell("rounding", CAUGHT, SURVIVED), 1),
        (_cell("rounding", EQUIVALENT), 1),
        (_cell("rounding"), 1),
        (_cell("mismatch"), 1),
        (_cell("error"), 3),
        (_cell("unsupported"), 5),
    ],
)
def test_the_exit_code_is_1_unless_every_counted_fault_was_caught(cell: Cell, code: int) -> None:
    assert decide_certified([cell], strict=False, exit_zero=False) == code
    assert decide_certified([cell], strict=False, exit_zero=True) == (0 if code == 1 else code)


def test_a_certificate_survives_the_record() -> None:
    cell = _cell("rounding", CAUGHT, SURVIVED)
    found = certificates.of(cell)
    read = decode(encode(Record(cells=[cell])))

    assert certificates.of(read.cells[0]) == found
    assert found is not None
    assert (found.median, found.worst) == (1e-6, Sensitivity("w", 1e-6, 0))


def test_the_report_says_what_was_caught_and_what_was_not() -> None:
    text = report.render(Record(cells=[_cell("rounding", CAUGHT, SURVIVED)]), verbosity=1)

    assert "1 of 2 (50 %)" in text
    assert "  survived: drop: all_reduce 1 over dp" in text
    assert "1.0e-06 (w)" in text
    assert text.endswith("1 of 2 planted faults caught, 0 with the right cause")
