"""Rows, replicas, causes and the first divergence, on hand-made observations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import Bench, Whole
from judging_cases import make_case
from torch import Tensor, nn

from spmd_verify.cause import factor_meaning
from spmd_verify.compare import compare, hyper_parameter_differences
from spmd_verify.errors import ReferenceRunError
from spmd_verify.judge import Judgement, judge
from spmd_verify.layouts import scatter
from spmd_verify.measure import Statistics
from spmd_verify.reference.single import make_reference
from spmd_verify.reference.trajectory import Observed
from spmd_verify.ulp import ulp_distance


@dataclass(frozen=True)
class Chunk:
    """A torch.chunk split."""

    dim: int


class Partial:
    """A pending sum."""

    op = "sum"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    case = make_case("mlp", dtype="float32", optimizer="sgd", steps=2)
    return Bench(case, tmp_path_factory.mktemp("store"))


def _observed(value: Tensor, layout: Any, mesh: tuple[int, ...] = (2,)) -> Observed:
    parts = scatter(value, layout, mesh)
    return Observed([t.clone() for t in parts.values()], layout, list(parts))


def _shard(value: Tensor) -> Observed:
    return _observed(value, (Chunk(0),) if value.ndim else (Whole(),))


def _judged(bench: Bench, change: Any = None, *, separate: bool = False) -> Judgement:
    """Judge the reference itself on 2 ranks, sharded, after `change(run, step, seen)`."""
    statistics: list[Statistics] = []
    for run in ("free", "anchored"):
        for step, record in enumerate(bench.reference.run.steps):
            seen = {s: {n: _shard(v) for n, v in tensors.items()} for s, tensors in record.items()}
            if change is not None:
                change(run, step, seen)
            for rank in (0, 1) if separate else (None,):
                part = seen if rank is None else _of_rank(seen, rank)
                statistics += compare(bench.store, part, run=run, step=step, mesh_shape=(2,))
    return judge(bench.store, statistics, axes={"dp": 2})


def _of_rank(seen: Any, rank: int) -> Any:
    return {
        stage: {
            name: Observed([o.local[rank]], o.layout, [o.coordinates[rank]])
            for name, o in tensors.items()
        }
        for stage, tensors in seen.items()
    }


def _felt(seen: Any, name: str) -> None:
    """Let a wrong gradient reach its parameter, as it does where the optimizer uses it."""
    for local in seen["parameters"][name].local:
        local += 1


@pytest.mark.parametrize("separate", [False, True])
def test_shards_of_the_reference_are_exact(bench: Bench, separate: bool) -> None:
    found = _judged(bench, separate=separate)
    assert set(found.counts) == {"exact"}
    assert found.first_divergence is None
    assert found.cause is None
    assert next(r for r in found.rows if r.stage == "gradients").layout == "S(0)"


@pytest.mark.parametrize("times", [2.0, 200.0])
def test_losses_of_parts_are_read_as_their_mean_however_near_the_wholes_they_are(
    bench: Bench, times: float
) -> None:
    """In bfloat16 the floor of the loss may be as large as what parts differ by."""

    def change(run: str, step: int, seen: Any) -> None:
        entry = bench.store.entry(step, "loss", "loss")
        assert entry is not None
        off = times * entry.floors["free"].noise
        loss = seen["loss"]["loss"].local[0]
        seen["loss"]["loss"] = Observed([loss - off, loss + off], None, [(0,), (1,)])

    rows = [row for row in _judged(bench, change).rows if row.stage == "loss"]

    assert [row.layout for row in rows] == ["mean over ranks"] * len(bench.reference.run.steps)
    assert all(row.verdict == "rounding" and (row.ratio or 0.0) <= 1.0 for row in rows)


@pytest.mark.parametrize("separate", [False, True])
def test_a_doubled_shard_is_seen_and_its_element_named_globally(
    bench: Bench, separate: bool
) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        if step == 1:
            seen["gradients"]["net.0.weight"].local[1] *= 2
            _felt(seen, "net.0.weight")

    found = _judged(bench, change, separate=separate)
    row = next(r for r in found.rows if r.verdict == "mismatch")
    assert (row.step, row.run, row.ranks) == (1, "anchored", [1])
    assert row.worst is not None
    assert row.worst.index[0] >= 12
    expected = bench.reference.run.steps[1]["gradients"]["net.0.weight"][tuple(row.worst.index)]
    assert row.worst.expected == float(expected)
    assert row.worst.actual == pytest.approx(2 * row.worst.expected)
    assert row.cause is not None
    assert row.cause.kind == "unexplained"
    assert row.max_ulp is not None
    assert row.max_ulp > 1000


def test_a_gradient_that_the_optimizer_did_not_use_is_undetermined(bench: Bench) -> None:
    """Wrong as read, but large enough to show in the parameter, which is right."""

    def change(run: str, step: int, seen: Any) -> None:
        seen["gradients"]["net.0.weight"].local[1] *= 2

    found = _judged(bench, change)
    assert found.verdict == "rounding"
    rows = [r for r in found.rows if (r.stage, r.name) == ("gradients", "net.0.weight")]
    assert all(row.verdict == "undetermined" for row in rows)
    assert "not what the optimizer used" in rows[0].unknown["reason"]


def test_a_gradient_fault_too_small_for_the_parameter_is_a_mismatch(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        for local in seen["gradients"]["net.0.weight"].local:
            local *= 1.00001

    found = _judged(bench, change)
    assert found.first_divergence is not None
    assert found.first_divergence.tensor == "net.0.weight"


def test_a_common_factor_is_fitted_over_all_parts(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        for local in seen["gradients"]["net.0.weight"].local:
            local *= 0.5
        _felt(seen, "net.0.weight")

    found = _judged(bench, change, separate=True)
    assert found.cause is not None
    assert found.cause.kind == "factor"
    assert found.cause.factor == pytest.approx(0.5)
    assert "1 / ranks of dp" in found.cause.text
    assert found.cause.axis == "dp"
    assert found.first_divergence is not None
    assert found.first_divergence.step == 0


def test_replicas_that_differ_are_caught_on_the_rank_that_is_wrong(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        value = bench.reference.run.steps[step]["parameters"]["net.0.bias"]
        seen["parameters"]["net.0.bias"] = _observed(value, (Whole(),))
        if step == 0:
            seen["parameters"]["net.0.bias"].local[1][3] += 0.5

    found = _judged(bench, change, separate=True)
    row = next(r for r in found.rows if r.verdict == "mismatch")
    assert row.ranks == [1]
    assert row.unknown["copies_differ"]


def test_initial_state_must_be_equal_to_the_bit(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        if "initial_state" in seen:
            local = seen["initial_state"]["net.0.weight"].local[0]
            local[0, 0] = torch.nextafter(local[0, 0], torch.tensor(9.0))

    found = _judged(bench, change)
    assert found.cause is not None
    assert found.cause.kind == "initial"
    assert found.first_divergence is not None
    assert found.first_divergence.stage == "initial_state"


def test_a_partial_sum_is_reduced_where_all_ranks_are_here(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        value = bench.reference.run.steps[step]["gradients"]["net.0.weight"]
        seen["gradients"]["net.0.weight"] = _observed(value, (Partial(),))

    assert _judged(bench, change).verdict == "exact"
    found = _judged(bench, change, separate=True)
    row = next(r for r in found.rows if (r.stage, r.name) == ("gradients", "net.0.weight"))
    assert row.verdict == "undetermined"
    assert "reduction is still due" in row.unknown["reason"]


def test_an_undeclared_layout_is_explained_by_its_content(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        for observed in seen["module_outputs"].values():
            observed.layout = None

    assert _judged(bench, change, separate=True).verdict == "exact"


def test_a_module_output_alone_is_no_mismatch_but_localises_one(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        if step == 0:
            seen["module_outputs"]["net.1"].local[0] += 1

    found = _judged(bench, change)
    assert found.verdict == "rounding"
    assert found.counts["undetermined"] == 1

    def both(run: str, step: int, seen: Any) -> None:
        change(run, step, seen)
        if step == 0:
            seen["gradients"]["net.3.weight"].local[0] += 1
            _felt(seen, "net.3.weight")

    found = _judged(bench, both)
    assert found.first_divergence is not None
    assert found.first_divergence.tensor == "net.1"
    later = [r for r in found.rows if r.verdict == "mismatch"][1:]
    assert all(r.downstream_of == "step 0, module_outputs, net.1" for r in later)


def test_a_gradient_that_no_rank_shows_is_a_mismatch(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        del seen["gradients"]["net.0.weight"]
        _felt(seen, "net.0.weight")

    found = _judged(bench, change)
    assert found.cause is not None
    assert "absent on every rank" in found.cause.text


def test_elements_that_no_rank_has_are_a_mismatch(bench: Bench) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        observed = seen["parameters"]["net.0.weight"]
        del observed.local[1], observed.coordinates[1]

    found = _judged(bench, change)
    assert found.cause is not None
    assert "on no rank" in found.cause.text


def test_hyper_parameters_are_compared_exactly(bench: Bench) -> None:
    values = dict(bench.store.index.hyper_parameters[1])
    assert values["lr"] == 0.1
    same = hyper_parameter_differences(bench.store, values, run="free", step=1, coordinate=(0,))
    assert not same
    values["lr"] = 0.2
    extra = hyper_parameter_differences(
        bench.store, values, run="anchored", step=1, coordinate=(0,)
    )

    statistics: list[Statistics] = list(extra)
    for run in ("free", "anchored"):
        for step, record in enumerate(bench.reference.run.steps):
            seen = {s: {n: _shard(v) for n, v in tensors.items()} for s, tensors in record.items()}
            if step == 1:
                _felt(seen, "net.0.weight")
            statistics += compare(bench.store, seen, run=run, step=step, mesh_shape=(2,))
    found = judge(bench.store, statistics, axes={"dp": 2})
    assert found.first_divergence is not None
    assert (found.first_divergence.stage, found.first_divergence.tensor) == ("inputs", "lr")


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_losses_of_ranks_may_average_or_add_up_where_no_layout_is_declared(
    bench: Bench, how: str
) -> None:
    def change(run: str, step: int, seen: Any) -> None:
        whole = bench.reference.run.steps[step]["loss"]["loss"]
        share = whole if how == "mean" else whole / 2
        seen["loss"]["loss"] = Observed([share - 0.25, share + 0.25], None, [(0,), (1,)])

    found = _judged(bench, change, separate=True)
    assert found.verdict in ("exact", "rounding")
    assert any(how in note for note in found.notes)

    def declared(run: str, step: int, seen: Any) -> None:
        change(run, step, seen)
        seen["loss"]["loss"].layout = (Whole(),)

    assert _judged(bench, declared, separate=True).verdict == "mismatch"


def test_what_never_carried_signal_is_not_exercised(tmp_path: Path) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.zero = nn.Linear(12, 5), nn.Linear(2, 2), nn.Linear(12, 5)
            self.register_buffer("constant", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + 0 * self.zero(x)

    case = make_case(
        "own", dtype="float32", optimizer="sgd", model=Idle, inputs=lambda: [torch.randn(8, 12)]
    )
    found = Bench(case, tmp_path).judge(None)
    rows = {(r.step, r.stage, r.name): r.verdict for r in found.rows}
    assert rows[0, "gradients", "unused.weight"] == "not_exercised"
    assert rows[0, "gradients", "zero.weight"] == "not_exercised"
    assert rows[2, "parameters", "zero.weight"] == "not_exercised"
    assert rows[2, "buffers", "constant"] == "not_exercised"
    assert rows[0, "gradients", "used.weight"] == "exact"
    assert (found.exercised.n, found.exercised.of) == (4, 12)


def test_a_cell_without_any_signal_is_not_exercised(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.linear(x)

    case = make_case(
        "own", dtype="float32", optimizer="sgd", model=Nothing, inputs=lambda: [torch.randn(8, 12)]
    )
    assert Bench(case, tmp_path).judge(None).verdict == "not_exercised"


def test_a_model_that_differs_from_run_to_run_is_refused() -> None:
    class Clock(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            Clock.calls += 1
            return self.linear(x) * Clock.calls

    with pytest.raises(ReferenceRunError, match="not-deterministic"):
        make_reference(
            make_case("own", dtype="float32", model=Clock, inputs=lambda: [torch.randn(8, 12)])
        )


def test_a_reference_with_nan_is_refused() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) - 9).sqrt()

    with pytest.raises(ReferenceRunError, match="reference-not-finite"):
        make_reference(
            make_case("own", dtype="float32", model=Bad, inputs=lambda: [torch.randn(8, 12)])
        )


def test_factors_with_a_meaning() -> None:
    axes = {"dp": 4, "tp": 1}
    assert factor_meaning(4.0000001, 1e-6, axes) == "equals ranks of dp"
    assert factor_meaning(0.25, 1e-6, axes) == "equals 1 / ranks of dp"
    assert factor_meaning(2.0, 1e-6, axes) == "equals the square root of ranks of dp"
    assert factor_meaning(0.0, 1e-6, axes) == "it is zero"
    assert factor_meaning(1.7, 1e-6, axes) == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_ulp_distance_counts_representable_values(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    up = one + torch.finfo(dtype).eps
    assert ulp_distance(one, up).item() == 1
    assert ulp_distance(-one, -up).item() == 1
    assert ulp_distance(one * 0, -one * 0).item() == 0
    smallest = torch.finfo(dtype).smallest_normal
    assert ulp_distance(one * smallest, -one * smallest).item() > 0
    largest = torch.iinfo(torch.int64).max
    assert ulp_distance(one * torch.nan, one).item() == largest
    if dtype == torch.float64:
        edge = one * torch.finfo(dtype).max
        assert ulp_distance(edge, -edge).item() == largest
