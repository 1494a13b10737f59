"""The SGD probe: a gradient factor that the user's optimizer hides is seen beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_run import Events

from spmd_verify import config
from spmd_verify.arguments import flag_settings, parse_arguments
from spmd_verify.options import Options
from spmd_verify.prober import put
from spmd_verify.record import Cause, Cell, FirstDivergence, Record, Row, decode, encode
from spmd_verify.reporters.terminal import render
from spmd_verify.run import verify

# The gradients of the expert are doubled after the reduction under `bad`.
MODEL = """
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.expert = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.expert(torch.tanh(self.inp(x)))))

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])

def _step(model, optimizer, batch, factor):
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        if name.startswith("expert."):
            p.grad *= factor
    optimizer.step()
    return value.detach()

def parallelize_good(model, mesh):
    return model

def step_good(model, optimizer, batch, mesh):
    return _step(model, optimizer, batch, 1.0)

def parallelize_bad(model, mesh):
    return model

def step_bad(model, optimizer, batch, mesh):
    return _step(model, optimizer, batch, 2.0)

def setup_own(model, mesh):
    return model, get_optimizer(model.parameters())

step_own = step_good

def parallelize_hidden(model, mesh):
    model.__dict__["inner"] = get_optimizer(model.parameters())

def step_hidden(model, optimizer, batch, mesh):
    return _step(model, model.inner, batch, 1.0)

def get_optimizer(params):
    return OPTIMIZER
"""
OPTIMIZERS = {
    "adam": "torch.optim.Adam(params, lr=1e-2)",
    "sign": "SignSGD(params)",
    "sgd": "torch.optim.SGD(params, lr=0.1, momentum=0.9)",
}
# A step of the file that reads what only its own optimizer has.
READS_BETAS = """
def step(model, optimizer, batch):
    optimizer.param_groups[0]["betas"] = tuple(optimizer.param_groups[0]["betas"])
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    optimizer.step()
    return value
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of the file with several optimizers, all its styles and one engine's."""
    folder = tmp_path_factory.mktemp("probe")
    texts = {name: MODEL.replace("OPTIMIZER", text) for name, text in OPTIMIZERS.items()}
    texts["betas"] = texts["adam"] + READS_BETAS
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    targets = tuple(str(folder / f"{name}.py") for name in texts)
    options = Options(targets, ("user", "replicate"), steps=2, timeout_seconds=60.0)
    return verify(options, Events())


def _cell(record: Record, case: str, style: str) -> Cell:
    return next(c for c in record.cells if (Path(c.case).stem, c.style) == (case, style))


def _notes(record: Record, case: str) -> str:
    notes = record.unknown["notes"]
    return "\n".join(next(text for address, text in notes.items() if Path(address).stem == case))


@pytest.mark.dist
def test_a_factor_under_adam_is_caught_though_the_loss_agrees(record: Record) -> None:
    cell = _cell(record, "adam", "bad")

    assert cell.verdict == "mismatch"
    assert {row.verdict for row in cell.tensors if row.stage == "loss"} <= {"exact", "rounding"}
    assert cell.cause is not None
    assert cell.cause.kind == "factor"
    assert cell.unknown["probe"]["verdict"] == "mismatch"
    assert cell.unknown["probe"]["first_divergence"]["stage"] == "gradients"


@pytest.mark.dist
def test_a_factor_that_the_optimizer_hides_is_caught_by_the_probe(record: Record) -> None:
    cell = _cell(record, "sign", "bad")

    parameters = [r for r in cell.tensors if r.stage == "parameters" and r.run != "probe"]
    assert {row.verdict for row in parameters} <= {"exact", "rounding", "undetermined"}
    assert cell.verdict == "mismatch"
    assert cell.first_divergence is not None
    assert cell.first_divergence.stage == "gradients"
    assert cell.first_divergence.tensor.startswith("expert.")
    assert cell.cause is not None
    assert (cell.cause.kind, cell.cause.factor) == ("factor", pytest.approx(2.0, rel=1e-5))
    assert cell.cause.text.startswith("under plain SGD: ")
    assert cell.unknown["probe"]["verdict"] == "mismatch"
    text = render(record)
    assert "under plain SGD: " in text
    assert "sgd probe" in text.splitlines()[0]


@pytest.mark.dist
@pytest.mark.parametrize("case", ["adam", "sign"])
def test_a_right_style_passes_both(record: Record, case: str) -> None:
    cell = _cell(record, case, "good")

    assert cell.verdict == "rounding"
    assert cell.unknown["probe"] == {"verdict": "rounding"}


@pytest.mark.dist
def test_where_there_is_no_probe(record: Record) -> None:
    def probed(case: str) -> list[str]:
        cells = [cell for cell in record.cells if Path(cell.case).stem == case]
        return [cell.style for cell in cells if "probe" in cell.unknown]

    assert probed("sgd") == []
    assert "SGD probe" not in _notes(record, "sgd")
    assert probed("adam") == ["good", "bad"]
    assert "no SGD probe of own: setup_own builds the optimizer" in _notes(record, "adam")
    assert "no SGD probe of hidden: its step has an optimizer of its own" in _notes(record, "adam")
    assert probed("betas") == []
    assert "no SGD probe: the step does not take plain SGD" in _notes(record, "betas")
    assert {cell.verdict for cell in record.cells if cell.style in ("own", "hidden", "good")} == {
        "rounding"
    }


@pytest.mark.dist
def test_the_flag_decides_for_every_style(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("OPTIMIZER", OPTIMIZERS["sign"]))
    options = {"targets": (str(path),), "styles": ("replicate", "bad"), "steps": 1}

    on = verify(Options(**options, probe=True), Events())  # type: ignore[arg-type]
    off = verify(Options(**options, probe=False), Events())  # type: ignore[arg-type]

    assert [cell.verdict for cell in on.cells] == ["rounding", "mismatch"]
    assert on.cells[0].unknown["probe"]["verdict"] == "rounding"
    assert [cell.verdict for cell in off.cells] == ["rounding", "rounding"]
    assert all("probe" not in cell.unknown for cell in off.cells)


def test_flag_and_setting_are_read() -> None:
    def flag(*words: str) -> object:
        return flag_settings(parse_arguments(["model.py", *words])).get("probe")

    assert (flag(), flag("--probe"), flag("--no-probe")) == (None, True, False)
    assert config.load(Path("/"), {"SPMD_VERIFY_PROBE": "no"}) == {"probe": False}


def _judged(verdict: str) -> Cell:
    return Cell(
        case="m.py", style="user", mesh="dp=2", dtype="float32", world_size=2,
        runner="processes", verdict=verdict,
    )  # fmt: skip


def _failing() -> Cell:
    cell = _judged("mismatch")
    cell.first_divergence = FirstDivergence(step=0, stage="gradients", tensor="w")
    cell.cause = Cause(kind="factor", text="w is 2 x the reference", residual=0.5, factor=2.0)
    cell.tensors = [Row(name="w", stage="gradients", step=0, verdict="mismatch", cause=cell.cause)]
    return cell


def test_a_failing_probe_makes_a_passing_cell_a_mismatch() -> None:
    cell = _judged("rounding")
    put(cell, _failing())

    assert cell.verdict == "mismatch"
    assert cell.cause is not None
    assert cell.cause.text == "under plain SGD: w is 2 x the reference"
    assert [row.run for row in cell.tensors] == ["probe"]
    again = decode(encode(Record(cells=[cell]))).cells[0]
    assert again.unknown["probe"]["cause"]["factor"] == 2.0


def test_a_failing_cell_keeps_its_own_divergence() -> None:
    cell = _failing()
    cell.cause = Cause(kind="stale", text="as before", residual=0.0)
    put(cell, _failing())

    assert cell.cause.kind == "stale"
    assert cell.unknown["probe"]["verdict"] == "mismatch"


def test_the_column_is_there_only_where_a_cell_has_a_probe() -> None:
    plain, probed = _judged("rounding"), _judged("rounding")
    put(probed, _judged("exact"))

    assert "sgd probe" not in render(Record(cells=[plain]))
    lines = render(Record(cells=[plain, probed])).splitlines()
    assert [line.split()[3] for line in lines[2:4]] == ["-", "exact"]
