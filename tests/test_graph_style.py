"""The engine's styles: planted faults are found where they are, refusals say why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spmd_verify import run
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.options import Options
from spmd_verify.record import Cell, Record

pytestmark = pytest.mark.dist

CaseWriter = Callable[..., str]

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, HIDDEN, bias=False)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(HIDDEN, 3)

    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))

def get_inputs():
    return torch.randn(BATCH, 6)

def loss(output):
    return output.square().mean()
"""


def model_of(*, batch: int = 8, hidden: int = 7) -> str:
    """Return the text of a case with dropout and BatchNorm; 7 splits unevenly."""
    return MODEL.replace("BATCH", str(batch)).replace("HIDDEN", str(hidden))


DATA_PARALLEL = ("replicate", "fully_shard", "default", "dtensor_expand")


class Silent:
    """Keeps nothing."""

    def note(self, text: str) -> None:
        pass

    def planned(self, count: int) -> None:
        pass

    def started(self, what: str) -> None:
        pass

    def finished(self, cell: Cell) -> None:
        pass

    def alive(self, style: str, step: int, rank: int) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Return a function that judges a case under named styles, else the data-parallel ones."""

    def judged(target: str, *names: str, **options) -> Record:
        monkeypatch.setattr(run, "select", lambda *_: names or DATA_PARALLEL)
        settings = {"steps": 2, "runner": "lockstep", "timeout_seconds": 120.0, **options}
        return run.verify(Options(targets=(target,), **settings), Silent())

    return judged


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_planted_faults_are_found_at_their_stage_and_tensor(
    write_case: CaseWriter, judge: Callable[..., Record], dtype: str
) -> None:
    model = write_case(model_of(hidden=8))
    names = ("DROPPED", "HALVED", "SCALED", "SCALED_SHARD", "SHIFTED", "STALE")
    record = judge(model, *(f"planted:{name}" for name in names), dtype=dtype)

    assert [cell.verdict for cell in record.cells] == ["mismatch"] * len(names)
    for name, cell in zip(names, record.cells, strict=True):
        first = cell.first_divergence
        assert first is not None
        assert first.step == 0
        assert first.stage == ("buffers" if name == "STALE" else "gradients"), name
    halved, scaled = record.cells[1], record.cells[2]
    assert halved.cause is not None
    assert scaled.cause is not None
    assert halved.cause.factor == pytest.approx(0.5)
    assert scaled.cause.factor == pytest.approx(1.0001, rel=1e-6)
    assert record.cells[5].first_divergence.tensor == "norm.running_mean"


def test_the_first_differing_operator_is_named_with_the_users_line(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    model = write_case(model_of())
    cell = judge(model, "planted:SCALED").cells[0]

    assert cell.first_divergence is not None
    assert str(cell.first_divergence.operator).startswith("aten.")
    assert str(cell.first_divergence.source).startswith(f"{model}:")


@pytest.mark.parametrize(("batch", "ranks"), [(7, 4), (3, 4)])
def test_uneven_and_empty_parts_pass(
    write_case: CaseWriter, judge: Callable[..., Record], batch: int, ranks: int
) -> None:
    model = write_case(model_of(batch=batch))
    record = judge(model, mesh=MeshSpec((("dp", ranks),)), dtype="float64", steps=3)

    assert [cell.verdict for cell in record.cells] == ["rounding"] * 4


@pytest.mark.parametrize("runner", ["processes", "lockstep"])
def test_a_mesh_of_two_axes_passes(
    write_case: CaseWriter, judge: Callable[..., Record], runner: str
) -> None:
    model = write_case(model_of())
    record = judge(model, mesh=MeshSpec((("dp", 2), ("tp", 2))), runner=runner)

    assert [cell.verdict for cell in record.cells] == ["rounding"] * 4
    assert {cell.mesh for cell in record.cells} == {"dp=2,tp=2"}
    assert {cell.world_size for cell in record.cells} == {4}


@pytest.mark.parametrize("runner", ["processes", "lockstep"])
def test_what_the_engine_refuses_is_unsupported_with_its_reason(
    write_case: CaseWriter, judge: Callable[..., Record], runner: str
) -> None:
    several = """
def get_optimizer(params):
    return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]
"""
    record = judge(write_case(model_of() + several), runner=runner)

    assert [cell.verdict for cell in record.cells] == ["unsupported"] * 4
    for cell in record.cells:
        assert "single Optimizer" in str(cell.skipped_reason)
        assert "\n" not in str(cell.skipped_reason)


def test_both_runners_say_the_same(write_case: CaseWriter, judge: Callable[..., Record]) -> None:
    """At two ranks gloo's order and lockstep's are one: the numbers are equal bit for bit."""
    model = write_case(model_of())
    found = [judge(model, runner=runner) for runner in ("processes", "lockstep")]

    def errors(record: Record) -> list[tuple[str, str, float | None]]:
        return [
            (cell.style, f"{row.run} {row.step} {row.stage} {row.name}", row.error)
            for cell in record.cells
            for row in cell.tensors
        ]

    assert errors(found[0]) == errors(found[1])


def test_captures_are_shared_between_the_styles_of_a_case(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    record = judge(write_case(model_of()), steps=3)

    assert [cell.unknown["captures"] for cell in record.cells] == [3, 0, 0, 0]


REMEMBERS = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(1.0))
        self.memory = None

    def forward(self, x):
        y = torch.tanh(self.layer(x)) * self.scale
        y = y if self.memory is None else y + self.memory
        self.scale = self.scale * 0.5
        self.memory = y.detach().mean(0)
        return y.square().mean()
"""


def test_what_a_forward_reassigns_is_kept_by_every_build_for_itself(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    inputs = "\ndef get_inputs():\n    return torch.randn(7, 4)\n"
    record = judge(write_case("import torch\n" + REMEMBERS + inputs), steps=3)

    assert [cell.verdict for cell in record.cells] == ["rounding"] * 4
    assert all("eval_outputs" in {row.stage for row in cell.tensors} for cell in record.cells)


def test_an_optimizer_with_numbers_in_python_passes(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    counting = """
class Counting(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["count"])

def get_optimizer(params):
    return Counting(params)
"""
    model = write_case(model_of() + counting)
    record = judge(model, steps=3)

    assert [cell.verdict for cell in record.cells] == ["rounding"] * 4
