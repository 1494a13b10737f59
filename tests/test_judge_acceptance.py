"""What the judge promises: faults are caught, correct reorderings pass, nothing is hidden.

Candidates and faults are simulated on one device (see `judging`); none uses the engine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import (
    CLEAN,
    Bench,
    MicroBatches,
    ScaledGradient,
    SplitContraction,
    failing,
    judge_runs,
)
from judging_cases import make_case
from torch import Tensor, nn

from spmd_verify.noise.floor_table import FloorTable

FAULTED = {
    "mlp": "net.0.weight",
    "transformer": "q.weight",
    "batch_norm": "norm.weight",
    "dropout": "first.weight",
    "contrastive": "left.weight",
    "mask": "head.weight",
    "recurrent": "lstm.weight_hh_l0",
}

Benches = Callable[..., Bench]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Benches:
    """Return benches by their arguments; each is made once per module."""
    made: dict[Any, Bench] = {}

    def get(name: str, dtype: str, optimizer: str = "adamw", seed: int = 0) -> Bench:
        key = (name, dtype, optimizer, seed)
        if key not in made:
            case = make_case(name, dtype=dtype, optimizer=optimizer, seed=seed)
            made[key] = Bench(case, tmp_path_factory.mktemp("store"))
        return made[key]

    return get


class FaultInOtherOrder(ScaledGradient):
    """The fault in a run whose sums are also ordered otherwise."""

    def around(self, step: int) -> Any:
        return SplitContraction(4, is_reversed=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FAULTED)
def test_a_factor_on_one_gradient_is_a_mismatch_with_its_factor(
    bench: Benches, name: str, dtype: str
) -> None:
    for member in (ScaledGradient, FaultInOtherOrder):
        found = bench(name, dtype).judge(member("fault", FAULTED[name], 1.0001))
        assert found.verdict == "mismatch"
        first = found.first_divergence
        assert first is not None
        assert (first.step, first.stage, first.tensor) == (0, "gradients", FAULTED[name])
        assert found.cause is not None
        assert found.cause.kind == "factor"
        assert found.cause.factor == pytest.approx(1.0001, abs=2e-6)
        assert found.cause.residual < 4.0


@pytest.mark.parametrize("name", FAULTED)
def test_in_float64_one_part_in_ten_billion_is_seen(bench: Benches, name: str) -> None:
    found = bench(name, "float64").judge(FaultInOtherOrder("fault", FAULTED[name], 1 + 1e-10))
    assert found.verdict == "mismatch"
    assert found.cause is not None
    assert found.cause.factor == pytest.approx(1 + 1e-10, abs=1e-11)


def test_in_float32_one_part_in_a_million_is_seen(bench: Benches) -> None:
    found = bench("mlp", "float32").judge(ScaledGradient("fault", FAULTED["mlp"], 1 + 1e-6))
    assert found.verdict == "mismatch"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FAULTED)
def test_clean_candidates_pass(bench: Benches, name: str, dtype: str) -> None:
    for how, member in CLEAN.items():
        if dtype == "float64" and how not in ("contraction permuted", "decomposed", "unrolled"):
            continue
        found = bench(name, dtype).judge(member)
        assert not failing(found), (how, failing(found))
        assert found.verdict in ("rounding", "exact"), (how, found.undetermined_reason)


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
@pytest.mark.parametrize("name", ["mlp", "transformer", "batch_norm"])
def test_clean_candidates_pass_under_other_optimizers(
    bench: Benches, name: str, optimizer: str
) -> None:
    for how in ("contraction in 4, reversed", "decomposed"):
        found = bench(name, "float32", optimizer).judge(CLEAN[how])
        assert not failing(found), (how, failing(found))


@pytest.mark.parametrize("parts", [2, 8])
def test_summed_micro_batches_pass(bench: Benches, parts: int) -> None:
    for dtype in ("float32", "float64"):
        for name in ("mlp", "transformer"):
            found = bench(name, dtype).judge(MicroBatches("micro", parts))
            assert not failing(found), failing(found)


@pytest.mark.parametrize("seed", range(20))
def test_clean_candidates_pass_over_seeds(bench: Benches, seed: int) -> None:
    name = ("mlp", "batch_norm", "transformer", "recurrent")[seed % 4]
    dtype = ("float32", "float64")[seed // 4 % 2]
    judged = bench(name, dtype, seed=seed + 100)
    for how in ("contraction permuted", "unrolled"):
        found = judged.judge(CLEAN[how])
        assert not failing(found), (how, failing(found))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(6))
def test_two_samples_in_a_batch_norm_raise_no_false_alarm(
    bench: Benches, dtype: str, seed: int
) -> None:
    """Moving results alone left a floor of zero here: what cancelled has nothing to move."""
    judged = bench("two_samples", dtype, seed=seed)
    for name, member in CLEAN.items():
        found = judged.judge(member)
        assert not failing(found), (name, failing(found))
    assert failing(judged.judge(ScaledGradient("fault", "head.weight", 1.0001)))


def test_where_the_free_run_decides_nothing_the_anchored_one_does(bench: Benches) -> None:
    judged = bench("chaotic", "float32")
    found = judged.judge(CLEAN["contraction in 2"])
    rows = {(r.step, r.stage, r.name): r for r in found.rows}
    carried = rows[2, "optimizer_state", "head.weight.exp_avg"]
    assert (carried.run, carried.verdict) == ("anchored", "rounding")
    assert "noise floor" in carried.unknown["free_run"]
    assert not failing(found)

    anchored = judged.device.run(anchors=judged.reference.run)
    state = anchored.steps[2]["optimizer_state"]
    state["head.weight.exp_avg"] = state["head.weight.exp_avg"] * 1.0001
    free = judged.device.run(member=CLEAN["contraction in 2"])
    (row,) = failing(judge_runs(judged.store, free, anchored))
    assert row.startswith("anchored 2 optimizer_state head.weight.exp_avg")


def test_parameters_that_only_the_free_run_leaves_undecided_are_judged_anchored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chaos may set most elements of a parameter apart; one step from the reference decides."""
    build, key = FloorTable.build, (2, "parameters", "net.0.weight")

    def chaotic(table: FloorTable) -> Any:
        found = build(table)
        if table.is_free:
            found[key].undetermined_elements = 24 * 12 - 1
        return found

    monkeypatch.setattr(FloorTable, "build", chaotic)
    judged = Bench(make_case("mlp", dtype="float32", optimizer="adamw"), tmp_path)

    (row,) = (
        r for r in judged.judge(CLEAN["contraction in 2"]).rows if (r.step, r.stage, r.name) == key
    )

    assert (row.run, row.verdict) == ("anchored", "rounding")
    assert "only rounding decides" in row.unknown["free_run"]


class UnusedExpert(nn.Module):
    """Of two experts the second gets no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.used(x), self.unused(x[:0])])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_outputs_without_rows_have_floors_too(tmp_path: Path, dtype: str) -> None:
    case = make_case(
        "own",
        dtype=dtype,
        optimizer="sgd",
        model=UnusedExpert,
        inputs=lambda: [torch.randn(8, 6)],
    )
    judged = Bench(case, tmp_path)

    assert not failing(judged.judge(CLEAN["contraction in 2"]))
    assert failing(judged.judge(ScaledGradient("fault", "used.weight", 1.0001)))


def test_bfloat16_candidates_pass_and_faults_are_seen(bench: Benches) -> None:
    judged = bench("mlp", "bfloat16")
    found = judged.judge(CLEAN["contraction in 2"])
    assert not failing(found), failing(found)
    found = judged.judge(ScaledGradient("fault", FAULTED["mlp"], 2.0))
    assert found.verdict == "mismatch"
    assert found.cause is not None
    assert found.cause.kind == "factor"


def test_elements_that_only_rounding_decides_are_undetermined_and_counted(bench: Benches) -> None:
    """The key bias has no gradient; Adam makes +-lr of its noise."""
    judged = bench("transformer", "float32")
    assert judged.noise.undetermined >= 16
    assert "flipped updates: all" in judged.noise.runs
    found = judged.judge(CLEAN["contraction in 2"])
    rows = {(r.step, r.stage, r.name): r for r in found.rows}
    for step in range(3):
        assert rows[step, "parameters", "k.bias"].verdict == "undetermined"
        assert "only rounding decides" in rows[step, "parameters", "k.bias"].unknown["reason"]
        assert rows[step, "gradients", "k.bias"].verdict == "rounding"
    assert found.undetermined_elements == 16
    assert found.verdict == "rounding"


def test_under_sgd_the_same_elements_are_decided(bench: Benches) -> None:
    judged = bench("transformer", "float32", "sgd")
    assert judged.noise.undetermined == 0
    found = judged.judge(CLEAN["contraction in 2"])
    rows = {(r.step, r.stage, r.name): r.verdict for r in found.rows}
    assert rows[0, "parameters", "k.bias"] in ("rounding", "exact", "not_exercised")


def test_an_interval_far_inside_the_usual_update_decides(bench: Benches) -> None:
    """In float64 Adam's eps is far above the key bias's gradient: it hardly moves on any side."""
    judged = bench("transformer", "float64", "adam")
    found = judged.judge(CLEAN["contraction in 2"])
    rows = {(r.step, r.stage, r.name): r for r in found.rows}
    assert rows[0, "parameters", "k.bias"].verdict in ("rounding", "exact")

    free = judged.device.run()
    free.steps[0]["parameters"]["k.bias"] = free.steps[0]["parameters"]["k.bias"] + 1e-6
    found = judge_runs(judged.store, free, judged.device.run(anchors=judged.reference.run))
    assert found.first_divergence is not None
    assert found.first_divergence.tensor == "k.bias"


def test_an_update_outside_its_interval_is_a_mismatch(bench: Benches) -> None:
    judged = bench("transformer", "float32")
    free = judged.device.run()
    free.steps[0]["parameters"]["k.bias"] = free.steps[0]["parameters"]["k.bias"] + 0.1
    found = judge_runs(judged.store, free, judged.device.run(anchors=judged.reference.run))
    assert found.first_divergence is not None
    assert found.first_divergence.tensor == "k.bias"


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("dropout", 1),
        ("batch_norm", 2),
        ("contrastive", 2),
        ("mask", 3),
        ("mlp", 0),
        ("transformer", 0),
    ],
)
def test_illegal_reorderings_are_dropped_and_named(bench: Benches, name: str, dropped: int) -> None:
    """Dropout in parts draws the whole batch's masks one part after the other: legal."""
    for dtype in ("float32", "float64"):
        noise = bench(name, dtype).noise
        assert len(noise.dropped) == dropped, (dtype, noise.dropped)
        assert len(noise.runs) >= 4
        if name == "dropout":
            assert "batch permutation changes the result" in noise.dropped[0]


def test_one_wrong_row_of_many_is_caught(bench: Benches) -> None:
    """Diluted in the norm of the tensor, plain in the norm of its row."""
    judged = bench("transformer", "float32")
    free = judged.device.run()
    gradient = free.steps[0]["gradients"]["tokens.weight"].clone()
    weakest = int(gradient.norm(dim=1).argmin())
    gradient[weakest] *= 1.0001
    free.steps[0]["gradients"]["tokens.weight"] = gradient
    found = judge_runs(judged.store, free, judged.device.run(anchors=judged.reference.run))
    row = next(r for r in found.rows if r.verdict == "mismatch")
    assert (row.stage, row.name) == ("gradients", "tokens.weight")
    assert row.unknown["row"] == weakest


def test_nan_in_the_candidate_only_is_a_mismatch(bench: Benches) -> None:
    judged = bench("mlp", "float32")
    free = judged.device.run()
    value = free.steps[1]["parameters"]["net.0.weight"].clone()
    value[2, 3] = torch.nan
    free.steps[1]["parameters"]["net.0.weight"] = value
    found = judge_runs(judged.store, free, judged.device.run(anchors=judged.reference.run))
    assert found.verdict == "mismatch"
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.stage) == (1, "parameters")


def test_a_fault_from_step_one_on_is_decided_by_the_anchored_run(bench: Benches) -> None:
    judged = bench("mlp", "float32")
    anchored = judged.device.run(anchors=judged.reference.run)
    gradient = anchored.steps[1]["gradients"]["net.5.weight"]
    anchored.steps[1]["gradients"]["net.5.weight"] = gradient * 1.0001
    free = judged.device.run()
    gradient = free.steps[1]["gradients"]["net.5.weight"]
    free.steps[1]["gradients"]["net.5.weight"] = gradient * 1.0001
    found = judge_runs(judged.store, free, anchored)
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.tensor) == (1, "net.5.weight")
    row = next(r for r in found.rows if r.verdict == "mismatch")
    assert row.run == "anchored"


def test_the_reference_itself_is_exact(bench: Benches, tmp_path: Path) -> None:
    found = bench("mlp", "float32").judge(None)
    assert found.verdict == "exact"
    assert set(found.counts) == {"exact"}
    assert found.exercised.n == found.exercised.of > 0
