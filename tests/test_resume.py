"""The resume check: what no state dict holds is caught, and what one holds is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_run import Events

from spmd_verify import run
from spmd_verify.options import Options
from spmd_verify.record import Cell

pytestmark = pytest.mark.dist

HEAD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(9, 3)
        self.register_buffer("count", torch.zeros(1), persistent=PERSISTENT)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        if self.training:
            self.count += 1
        return self.out(x) * self.count

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()

# A step of its own, so that no noise run splits the batch: forwards are counted.
def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]))
    value.backward()
    optimizer.step()
    return value

def get_optimizer(params):
    return OPTIMIZER(params, lr=0.01)

class Attribute(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] / self.calls * p.grad

class State(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["calls"] = state.get("calls", torch.zeros(())) + 1
                p.data -= group["lr"] / state["calls"].item() * p.grad
"""

# File -> what its buffer and optimizer are, and whether a resumed run goes on as if nothing was.
FILES = {
    "adamw": ("True", "torch.optim.AdamW", True),
    "state": ("True", "State", True),
    "attribute": ("True", "Attribute", False),
    "volatile": ("False", "torch.optim.AdamW", False),
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Cell]:
    """Return every file's cell under ddp, fsdp2, zero1 and an engine style."""
    folder = tmp_path_factory.mktemp("resume")
    for name, (persistent, optimizer, _) in FILES.items():
        text = HEAD.replace("PERSISTENT", persistent).replace("OPTIMIZER", optimizer)
        (folder / f"{name}.py").write_text(text)
    options = Options(
        tuple(str(folder / f"{name}.py") for name in FILES),
        ("ddp", "fsdp2", "zero1", "fully_shard"),
        resume_check=True,
        probe=False,
        no_cache=True,
        timeout_seconds=60.0,
    )
    record = run.verify(options.checked(), Events())
    return {(Path(cell.case).stem, cell.style): cell for cell in record.cells}


@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_what_is_saved_is_silent(cells, style: str) -> None:
    for name in (name for name, (_, _, is_right) in FILES.items() if is_right):
        cell = cells[name, style]
        assert cell.verdict == "rounding", cell.message
        tried = [(e["way"], e["mesh"].partition("=")[2]) for e in cell.unknown["resume"]]
        assert tried == [("state_dict", "2"), ("checkpoint", "2"), ("checkpoint", "4")]
        assert {entry["verdict"] for entry in cell.unknown["resume"]} <= {"exact", "rounding"}
        assert "resumed: state_dict on" in cell.message


@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_a_buffer_that_is_not_saved_is_named(cells, style: str) -> None:
    cell = cells["volatile", style]

    assert cell.verdict == "mismatch"
    assert cell.cause is not None
    assert cell.cause.kind == "resume"
    assert "after loading, buffers differ: count" in cell.cause.text
    assert [entry["verdict"] for entry in cell.unknown["resume"]] == ["mismatch"] * 3
    first = cell.first_divergence
    assert first is not None
    assert (first.step, first.stage, first.tensor) == (1, "buffers", "count")
    assert {row.run for row in cell.tensors if row.verdict == "mismatch"} == {"resumed"}


@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_a_counter_outside_of_the_state_is_told(cells, style: str) -> None:
    cell = cells["attribute", style]

    assert cell.verdict == "mismatch"
    assert cell.cause is not None
    assert cell.cause.kind == "resume"
    assert "something that is in none of them" in cell.cause.text
    assert cell.unknown["resume"][0]["verdict"] == "mismatch"
    first = cell.first_divergence
    assert first is not None
    assert (first.step, first.stage) == (2, "parameters")


def test_a_state_that_is_sharded_by_owner_is_consolidated(cells) -> None:
    cell = cells["adamw", "zero1"]

    assert cell.verdict == "rounding", cell.message
    assert [(e["way"], e["verdict"]) for e in cell.unknown["resume"]] == [
        ("state_dict", "rounding")
    ]


def test_an_engine_style_is_resumed_through_its_tensors(cells) -> None:
    cell = cells["adamw", "fully_shard"]

    assert cell.verdict == "rounding", cell.message
    assert [(e["way"], e["verdict"]) for e in cell.unknown["resume"]] == [("live", "rounding")]
