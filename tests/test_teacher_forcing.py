"""Teacher forcing names the module that contains a fault, on two real ranks and without any."""

from __future__ import annotations

import pytest
from test_run import Events

from spmd_verify import run
from spmd_verify.examination.bisection import Outcome, Search, Stopped
from spmd_verify.examination.flow import Flow
from spmd_verify.options import Options
from spmd_verify.record import Cell, Row
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.processes import ProcessRunner
from spmd_verify.runner.specs import Boundary

# Three tensor-parallel blocks written by hand. A rank's part of what is inside a block is
# declared nowhere; `down` lacks its bias even where all is right, so that its output is no part
# of the reference's, nor a summand of it.
CASE = """
import torch.distributed as dist
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        nn.init.normal_(self.down.bias, 0.5, 0.3)

    def enter(self, x):
        return x

    def leave(self, x):
        return x

    def forward(self, x):
        return x + self.leave(self.down(F.silu(self.up(self.enter(self.norm(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_inputs(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def get_targets(step=0):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(50 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, factor):
        ctx.group, ctx.factor = group, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.factor:
            dist.all_reduce(gradient, group=ctx.group)
            gradient *= ctx.factor
        return gradient, None, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def tensor_parallel(model, mesh, faults):
    group, rank, size = mesh.get_group("tp"), mesh.get_local_rank("tp"), mesh.size()
    for i, block in enumerate(model.blocks):
        down, fault = block.down, faults.get(i)
        for name in ("weight", "bias"):
            whole = getattr(block.up, name).detach()
            setattr(block.up, name, nn.Parameter(whole.chunk(size, 0)[rank].clone()))
        down.weight = nn.Parameter(down.weight.detach().chunk(size, 1)[rank].clone())
        factor = {"scaled": 2.0, "unsummed": 0.0}.get(fault, 1.0)
        block.enter = lambda x, factor=factor: Enter.apply(x, group, factor)
        down.forward = lambda x, down=down: F.linear(x, down.weight)
        block.leave = lambda x, down=down: Leave.apply(x, group) + down.bias
        if fault == "bias_twice":
            block.leave = lambda x, down=down: Leave.apply(x + down.bias, group)
        if fault == "unreduced":
            block.leave = lambda x, down=down: x + down.bias
    return model


def mesh_good(): return {"tp": 2}
mesh_bias = mesh_two = mesh_unreduced = mesh_scaled = mesh_unsummed = mesh_good


def parallelize_good(model, mesh): return tensor_parallel(model, mesh, {})
def parallelize_bias(model, mesh): return tensor_parallel(model, mesh, {1: "bias_twice"})
def parallelize_two(model, mesh):
    return tensor_parallel(model, mesh, {0: "bias_twice", 2: "bias_twice"})
def parallelize_unreduced(model, mesh): return tensor_parallel(model, mesh, {1: "unreduced"})
def parallelize_scaled(model, mesh): return tensor_parallel(model, mesh, {1: "scaled"})
def parallelize_unsummed(model, mesh): return tensor_parallel(model, mesh, {1: "unsummed"})


def parallelize_summed(model, mesh): return model
parallelize_norm_only = parallelize_head_loss = parallelize_averaged = parallelize_summed


class Late(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1.25 if self.calls > 1 else 1.0)


def parallelize_late(model, mesh):
    model.blocks[2].up = Late(model.blocks[2].up)
    return model


def step_late(model, optimizer, batch, mesh):
    return data_parallel(model, optimizer, batch, average)


def data_parallel(model, optimizer, batch, finish, wrong_loss=1.0):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1]) * wrong_loss
    value.backward()
    for name, parameter in model.named_parameters():
        finish(name, parameter.grad)
    optimizer.step()
    return value.detach()


def average(name, gradient):
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def step_averaged(model, optimizer, batch, mesh):
    return data_parallel(model, optimizer, batch, average)


def step_summed(model, optimizer, batch, mesh):
    return data_parallel(model, optimizer, batch, lambda name, g: dist.all_reduce(g))


def step_norm_only(model, optimizer, batch, mesh):
    def finish(name, gradient):
        average(name, gradient)
        if name.startswith("blocks.1.norm"):
            gradient *= 1.5
    return data_parallel(model, optimizer, batch, finish)


def step_head_loss(model, optimizer, batch, mesh):
    return data_parallel(model, optimizer, batch, average, wrong_loss=1.25)
"""

Located = dict[str, Cell]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the case."""
    path = tmp_path_factory.mktemp("case") / "model.py"
    path.write_text(f"import torch\nfrom torch import nn\n\n{CASE}")
    return str(path)


@pytest.fixture(scope="module")
def cells(case: str) -> Located:
    """Judge every style of the case."""
    return judged(case, "user")


def judged(case: str, *styles: str, **options: object) -> Located:
    """Return the cells of some styles by name."""
    settings = {"steps": 2, "timeout_seconds": 100.0, "probe": False, **options}
    record = run.verify(Options(targets=(case,), styles=styles, **settings), Events())
    return {cell.style: cell for cell in record.cells}


def modules(cell: Cell) -> list[str]:
    assert cell.verdict == "mismatch"
    assert cell.first_divergence is not None
    assert cell.first_divergence.located, cell.unknown.get("not_located")
    return cell.first_divergence.modules


def said(cell: Cell) -> str:
    assert cell.first_divergence is not None
    return cell.first_divergence.located or ""


@pytest.mark.dist
class TestOnRanks:
    def test_a_block_whose_forward_is_wrong_is_named(self, cells: Located) -> None:
        assert modules(cells["bias"]) == ["blocks.1"]
        assert modules(cells["unreduced"]) == ["blocks.1"]

    def test_several_blocks_with_the_same_fault_are_all_named(self, cells: Located) -> None:
        assert modules(cells["two"]) == ["blocks.0", "blocks.2"]

    def test_a_block_whose_backward_alone_is_wrong_is_named(self, cells: Located) -> None:
        assert modules(cells["scaled"]) == ["blocks.1"]
        assert modules(cells["unsummed"]) == ["blocks.1"]
        assert "each rank's summand" in said(cells["unsummed"])

    def test_a_fault_of_the_reduction_is_no_modules(self, cells: Located) -> None:
        assert modules(cells["summed"]) == []
        assert "after backward: every module's own backward is right" in said(cells["summed"])

    def test_one_modules_own_gradients_are_told_from_what_it_passes_on(
        self, cells: Located
    ) -> None:
        assert modules(cells["norm_only"]) == ["blocks.1.norm"]

    def test_a_fault_of_the_loss_lies_behind_the_model(self, cells: Located) -> None:
        assert modules(cells["head_loss"]) == []
        assert "behind the output of model" in said(cells["head_loss"])

    def test_a_fault_of_a_later_step_is_found_in_that_step(self, cells: Located) -> None:
        first = cells["late"].first_divergence
        assert first is not None
        assert first.step == 1
        # The wrapper is new; what it wraps, and is right, keeps the name `blocks.2.up`.
        assert modules(cells["late"]) == ["blocks.2"]

    def test_right_styles_pass_and_nothing_more_is_run_for_them(self, cells: Located) -> None:
        for name in ("good", "averaged"):
            assert cells[name].verdict in ("exact", "rounding")
            assert cells[name].first_divergence is None

    def test_runs_are_few(self, cells: Located) -> None:
        texts = [said(cell) for cell in cells.values() if cell.first_divergence]
        counts = [int(text.rpartition("(")[2].split()[0]) for text in texts]
        assert len(counts) == 9
        # 26 boundaries with gradients, 40 with values: 2 x 6 + 2.
        assert max(counts) <= 14


@pytest.mark.dist
def test_the_same_is_named_in_bfloat16(case: str) -> None:
    cells = judged(case, "good", "unreduced", "scaled", "summed", dtype="bfloat16", steps=1)

    assert cells["good"].verdict == "rounding"
    assert modules(cells["unreduced"]) == ["blocks.1"]
    assert modules(cells["scaled"]) == ["blocks.1"]
    assert "after backward" in said(cells["summed"])


@pytest.mark.dist
def test_passing_cells_run_once_and_a_failing_run_costs_the_place_only(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []
    real = ProcessRunner.run_cell

    def run_cell(self, spec, on_note=None):
        if spec.feeding is None:
            return real(self, spec, on_note)
        forced.append(spec.style)
        return Failure("died", [1], "rank 1 died", "rank 1 died", "rank-died")

    monkeypatch.setattr(ProcessRunner, "run_cell", run_cell)
    cells = judged(case, "averaged", "summed", steps=1)

    assert cells["averaged"].verdict == "rounding"
    assert forced == ["summed"]
    summed = cells["summed"]
    assert summed.verdict == "mismatch"
    assert summed.cause is not None
    assert summed.cause.kind == "factor"
    assert said(summed) == ""
    assert summed.unknown["not_located"] == "rank 1 died"


# -- the search alone ---------------------------------------------------------------------------


def chain(findings: dict[str, str]) -> list[Boundary]:
    """Return boundaries in forward order from `{"a.in": finding}`."""
    return [
        Boundary(f"{key.rpartition('.')[0]}|{key.rpartition('.')[2]}|", finding, 1e-6)
        for key, finding in findings.items()
    ]


def searched(flow: Flow, repairs: str, rows: dict[str, Row]) -> tuple[int | None, int]:
    """Return place and runs where only feeding `repairs`, or all up to it, repairs the rows."""
    calls: list[list[str]] = []

    def fed(keys: list[str]) -> Outcome:
        calls.append(keys)
        is_repaired = repairs in keys
        return Outcome(frozenset() if is_repaired else frozenset(rows), frozenset())

    search = Search(flow, rows, fed, lambda: True)
    return search.place(), len(calls)


def loss_row() -> dict[str, Row]:
    return {"loss": Row(name="loss", stage="loss", step=0, verdict="mismatch")}


@pytest.mark.parametrize("fault", range(40))
def test_the_first_boundary_that_repairs_is_found_in_few_runs(fault: int) -> None:
    findings = {}
    for i in range(40):
        findings[f"m{i}.in"] = "right" if i <= fault else "wrong"
        findings[f"m{i}.out"] = "right" if i < fault else "wrong"
    flow = Flow("values", chain(findings))

    place, runs = searched(flow, f"m{fault}|out|", loss_row())

    assert place == 2 * fault + 1
    assert runs <= 3
    assert flow.module_at(place) == f"m{fault}"


def test_boundaries_that_say_nothing_are_skipped_and_the_module_around_is_named() -> None:
    findings = {
        "block.in": "right",
        "block.up.out": "right",
        "block.down.out": "unknown",
        "block.out": "wrong",
        "head.out": "wrong",
    }
    flow = Flow("values", chain(findings))

    place, _ = searched(flow, "block|out|", loss_row())

    assert place == 3
    assert flow.module_at(place) == "block"


def test_a_summand_inside_a_module_that_sums_later_is_not_blamed() -> None:
    findings = {
        "a.out": "right",
        "b.down.out": "summand",
        "b.out": "right",
        "c.in": "right",
        "c.out": "wrong",
    }
    flow = Flow("values", chain(findings))

    place, _ = searched(flow, "c|out|", loss_row())

    assert place == 4
    assert flow.module_at(place) == "c"


def test_a_sum_that_is_missing_in_front_of_a_residual_is_found_where_it_is_missing() -> None:
    # Both rows need it: what is fed inside the block repairs the branch and not the residual.
    findings = {
        "model.out": "right",
        "head.out": "right",
        "head.in": "summand",
        "block.out": "summand",
        "block.up.out": "wrong",
        "block.up.in": "doubtful",
        "block.norm.out": "wrong",
        "block.in": "doubtful",
        "stem.out": "doubtful",
    }
    flow = Flow("gradients", chain(findings))
    names = ("block.up.weight", "stem.weight")
    rows = {n: Row(name=n, stage="gradients", step=0, verdict="mismatch") for n in names}

    def fed(keys: list[str]) -> Outcome:
        if "head|in|" in keys or "block|out|" in keys:
            return Outcome(frozenset(), frozenset())
        wrong = {"stem.weight"} - (
            {"stem.weight"} if keys[-1] in ("block|in|", "stem|out|") else set()
        )
        if "block.up|out|" not in keys:
            wrong.add("block.up.weight")
        return Outcome(frozenset(wrong), frozenset({"block.up|out|"}))

    search = Search(flow, rows, fed, lambda: True)
    place = search.place()

    assert place is not None
    assert flow.boundaries[place].finding == "summand"
    assert search.others(place) == []


def test_a_share_of_the_loss_that_the_model_returns_is_not_blamed_for_it() -> None:
    findings = {"a.in": "right", "a.out": "wrong", "b.out": "wrong", "model.out": "doubtful"}
    flow = Flow("values", chain(findings))
    rows = loss_row()

    def fed(keys: list[str]) -> Outcome:
        wrong = frozenset(() if "a|out|" in keys else rows)
        return Outcome(wrong, frozenset({"a|out|", "model|out|"}))

    search = Search(flow, rows, fed, lambda: True)

    assert search.place() == 1


def test_nothing_to_feed_is_said() -> None:
    flow = Flow("values", chain({"a.out": "unknown"}))

    with pytest.raises(Stopped, match="no boundary of a module"):
        searched(flow, "a|out|", loss_row())
