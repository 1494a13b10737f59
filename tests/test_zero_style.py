"""zero1: the case's optimizer sharded by owner; right ones pass, an owner's fault is seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_run import Events
from test_torch_styles import BLOCKS, HEAD, TAIL

from spmd_verify import run
from spmd_verify.errors import Unsupported
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles.torch_zero import _Narrowed, shard

# Options of their own for every group, a schedule, frozen parameters.
GROUPED = """
def get_optimizer(model):
    named = list(model.named_parameters())
    return torch.optim.AdamW([
        {"params": [p for n, p in named if n.startswith("blocks.")], "weight_decay": 0.1},
        {"params": [p for n, p in named if not n.startswith("blocks.")], "lr": 1e-2},
    ])
"""
OPTIMIZERS = {
    "momentum": "torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "amsgrad": "torch.optim.Adam(params, lr=1e-2, amsgrad=True)",
    "adagrad": "torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1)",
    "several": "[torch.optim.SGD(params[:3], lr=0.1), torch.optim.RMSprop(params[3:])]",
}
# The owner of half of the parameters steps them by half as much and sends them to everyone.
FAULTY = """
class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            after = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for old, new in zip(before, after):
                    new.lerp_(old, 0.5)

def get_optimizer(params):
    return Faulty(params, lr=0.1)
"""
# The constructor's argument is gone; what it made of it is an attribute.
RAMP = """
class Ramp(torch.optim.AdamW):
    def __init__(self, params, steps):
        super().__init__(params, lr=1e-2)
        self.slope, self.calls = 1e-2 / steps, 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = self.calls * self.slope
        return super().step(closure)

def get_optimizer(params):
    return Ramp(params, 4)
"""
STALE = FAULTY.replace(
    "new.lerp_(old, 0.5)", 'self.state[new].get("momentum_buffer", new).mul_(1.01)'
)
STALE = STALE.replace("lr=0.1", "lr=0.1, momentum=0.9")


def _files() -> dict[str, str]:
    files = {
        name: f"\ndef get_optimizer(params):\n    return {made}\n"
        for name, made in OPTIMIZERS.items()
    }
    return {**files, "grouped": GROUPED, "ramp": RAMP, "faulty": FAULTY, "stale": STALE}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cell]:
    """Return the cells of every optimizer on two ranks."""
    folder = tmp_path_factory.mktemp("zero")
    for name, text in _files().items():
        (folder / f"{name}.py").write_text(HEAD + BLOCKS + TAIL + text)
    targets = tuple(str(folder / f"{name}.py") for name in _files())
    record = run.verify(Options(targets, ("zero1",), parse_mesh("2"), steps=2), Events())
    return {Path(cell.case).stem: cell for cell in record.cells}


@pytest.mark.dist
@pytest.mark.parametrize("name", [*OPTIMIZERS, "grouped", "ramp"])
def test_right_ones_pass_and_every_state_has_one_owner(cells: dict[str, Cell], name: str) -> None:
    cell = cells[name]
    state = [row for row in cell.tensors if row.stage == "optimizer_state"]

    assert cell.verdict == "rounding", cell.message
    owned = re.findall(r"rank 0 (\d+), rank 1 (\d+)", cell.message)
    assert owned
    assert all(int(first) and int(second) for first, second in owned)
    assert state


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [("faulty", "parameters", (0, 1)), ("stale", "optimizer_state", (1,))],
)
def test_a_fault_of_one_owner_is_seen(
    cells: dict[str, Cell], name: str, stage: str, ranks: tuple[int, ...]
) -> None:
    cell = cells[name]
    rows = [row for row in cell.tensors if row.stage == stage and row.step == 0]
    wrong = [row for row in rows if row.verdict == "mismatch"]

    assert cell.verdict == "mismatch"
    assert 0 < len(wrong) < len(rows)
    assert {tuple(row.ranks) for row in wrong} == {ranks}


@pytest.mark.dist
def test_float64_on_four_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(HEAD + BLOCKS + TAIL + GROUPED)
    options = Options((str(path),), ("zero1",), parse_mesh("4"), dtype="float64", steps=2)

    (cell,) = run.verify(options, Events()).cells

    assert cell.verdict == "rounding", cell.message


class Private(torch.optim.SGD):
    """Has an option that its groups and defaults do not have."""

    def __init__(self, params: object, lr: float = 0.1, power: float = 2.0) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.half_power = power / 2


def test_an_optimizer_with_attributes_of_its_own_is_narrowed() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = Private([{"params": [first], "lr": 0.3}, {"params": [second]}], power=6.0)
    optimizer.state[first]["momentum_buffer"] = torch.ones(2)
    optimizer.state[second]["momentum_buffer"] = torch.zeros(2)
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    groups[1]["params"] = []

    made = _Narrowed(optimizer)(groups)

    assert isinstance(made, Private)
    assert made.half_power == 3.0
    assert list(made.state) == [first]
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    made.step()
    torch.testing.assert_close(first.data, torch.full((2,), 1.0 - 0.3 * 1.9))
    assert second.data.tolist() == [1.0, 1.0]  # another rank's


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("masters", "parameter", "attribute masters holds weight"), ("step", None, "was replaced")],
)
def test_an_optimizer_that_cannot_be_narrowed_is_refused(
    name: str, value: str | None, text: str
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Private([parameter])
    setattr(optimizer, name, {"all": [parameter]} if value else optimizer.step)

    with pytest.raises(Unsupported, match=f"builds a Private .* {text}"):
        shard("zero1", optimizer, {id(parameter): "weight"}, None)
