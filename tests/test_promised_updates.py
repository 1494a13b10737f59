"""A per-rank style that differs in meaning is still held to its update."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_run import Events

from spmd_verify import run
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell

pytestmark = pytest.mark.dist

# Batch statistics of each rank: every per-rank style means something else than one device.
CASE = """
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9)
        self.last = nn.Linear(9, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))

def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return (output - torch.arange(4)).square().mean()
"""
# What ranks do after the optimizer's own step; on one device nothing.
OPTIMIZER = """
def local(value):
    return getattr(value, "_local_tensor", value).detach()

class Faulty(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        before = [local(p).clone() for p in params]
        super().step(closure)
        self.calls += 1
        for old, p in zip(before, params) if dist.is_initialized() and WHO else ():
            WHAT

def get_optimizer(params):
    return Faulty(params, lr=0.05, momentum=0.9)
"""
CLIPPED = """
def get_optimizer(params):
    return torch.optim.Adam(params, lr=0.01)

def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    if dist.is_initialized() and WHO:
        own = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()][:1]
        own = torch.nn.utils.get_total_norm(own)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, own)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return value
"""
HALVED = "local(p).lerp_(old, 0.5)"
ON_ONE = "dist.get_rank() == 1"
# What is planted: on which ranks, the code, the step and the stage that it is seen at first.
FAULTS = {
    "halved": (ON_ONE, HALVED, 0, "parameters"),
    "halved_all": ("True", HALVED, 0, "parameters"),
    "skipped": (ON_ONE, "p.ndim > 1 and local(p).copy_(old)", 0, "parameters"),
    "late": (ON_ONE, f"self.calls > 1 and {HALVED}", 1, "parameters"),
    "state": (
        "True",
        'self.state[p] and local(self.state[p]["momentum_buffer"]).mul_(0.9)',
        0,
        "optimizer_state",
    ),
}
STYLES = ("ddp", "fsdp2", "zero1", "pp")
Cells = dict[tuple[str, str], Cell]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Return the cells of every case under the per-rank styles on two ranks."""
    folder = tmp_path_factory.mktemp("updates")
    files = {
        name: CASE + OPTIMIZER.replace("WHO", who).replace("WHAT", what)
        for name, (who, what, _, _) in FAULTS.items()
    }
    files["right"] = CASE + OPTIMIZER.replace("WHO", "True").replace("WHAT", "pass")
    files["clipped"] = CASE + CLIPPED.replace("WHO", "False")
    files["clipped_by_a_part"] = CASE + CLIPPED.replace("WHO", "True")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    targets = tuple(str(folder / f"{name}.py") for name in files)
    options = Options(targets, STYLES, parse_mesh("2"), steps=2, timeout_seconds=60.0)
    record = run.verify(options, Events())
    return {(Path(cell.case).stem, cell.style): cell for cell in record.cells}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["right", "clipped"])
def test_a_right_update_leaves_the_cell_semantic(cells: Cells, name: str, style: str) -> None:
    cell = cells[name, style]

    assert cell.verdict == "semantic", cell.cause or cell.message
    assert "mismatch" not in cell.counts
    assert not any("promise" in said for said in cell.unknown.get("not_run", ()))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_update_is_a_mismatch(cells: Cells, name: str, style: str) -> None:
    cell, (who, _, step, stage) = cells[name, style], FAULTS[name]

    assert cell.verdict == "mismatch", cell.message
    assert cell.first_divergence is not None
    assert (cell.first_divergence.step, cell.first_divergence.stage) == (step, stage)
    assert cell.cause is not None
    assert "BatchNorm1d" in cell.cause.text  # what it means otherwise is said beside it
    wrong = [r for r in cell.tensors if r.verdict == "mismatch" and r.step == step]
    assert {r.stage for r in wrong} <= {"optimizer_state", "parameters"}
    assert cell.first_divergence.tensor in {r.name for r in wrong}
    assert cell.counts["semantic"] > 0
    if who == ON_ONE and style in ("ddp", "fsdp2", "pp"):
        assert {tuple(r.ranks) for r in wrong} == {(1,)}
    if name == "skipped":
        assert {r.name for r in wrong} <= {"first.weight", "last.weight"}


@pytest.mark.parametrize("style", STYLES)
def test_clipping_by_another_norm_is_a_mismatch(cells: Cells, style: str) -> None:
    cell = cells["clipped_by_a_part", style]

    assert cell.verdict == "mismatch", cell.message
    assert cell.first_divergence is not None
    assert cell.first_divergence.stage == "clipping"
    assert cell.cause is not None
    assert cell.cause.kind == "norm_clip"
