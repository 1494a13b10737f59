"""Behaviours 1-15, 19, 24-30, 53-55 of a data-parallel engine, on real ranks.

Under gradient_reduction="mean" the compiled step is eager DistributedDataParallel; under
the default it is one device on the global batch. The ranks' data always differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import Ranks
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import (
    FEW_STEPS,
    MANY_STEPS,
    Recorded,
    adam,
    assert_same,
    batches,
    built,
    count,
    ddp,
    engine,
    fused_adam,
    mean_loss,
    mlp,
    momentum,
    momentum_foreach,
    odd_mlp,
    part,
    sgd,
    single,
    state_of,
    sum_loss,
    train_step,
    whole,
)

import spmd
from spmd.layout import chunk_units

pytestmark = pytest.mark.dist

RUNS = {
    "1-sgd": (sgd, 1, FEW_STEPS),
    "2-momentum": (momentum, 5, MANY_STEPS),
    "3-foreach": (momentum_foreach, 5, MANY_STEPS),
    "4-fused-adam": (fused_adam, 5, MANY_STEPS),
}
STYLES = ("replicate", "fully_shard")


def train_as_ddp(make_optimizer: Any, steps: int, tolerance: Any, style: str, loss: Any) -> None:
    data = batches(steps)
    expected = ddp(mlp, make_optimizer, loss, data, warm=True)
    mode = spmd.DataParallel(style, gradient_reduction="mean")
    actual, _, model, _ = engine(mlp, make_optimizer, loss, data, mode, warm=True)
    assert_same(actual, expected, **tolerance)
    if style == "fully_shard":
        for name, parameter in model.named_parameters():
            full = actual["parameters"][name]
            torch.testing.assert_close(parameter.to_local(), part(full), rtol=0, atol=0)


def train_as_one_device(make_optimizer: Any, steps: int, tolerance: Any, style: str) -> None:
    data = batches(steps)
    expected = single(mlp, make_optimizer, sum_loss, data, warm=True)
    actual, *_ = engine(mlp, make_optimizer, sum_loss, data, spmd.DataParallel(style), warm=True)
    assert_same(actual, expected, **tolerance)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("run", RUNS)
def test_behaviours_1_to_8_mean_is_ddp(on_ranks: Ranks, run: str, style: str) -> None:
    on_ranks(train_as_ddp, *RUNS[run], style, sum_loss)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("run", RUNS)
def test_behaviours_1_to_8_global_is_one_device(on_ranks: Ranks, run: str, style: str) -> None:
    on_ranks(train_as_one_device, *RUNS[run], style)


def train_uneven(reduction: str) -> None:
    data = batches(3, rows=dist.get_world_size() * 2)
    reference = ddp if reduction == "mean" else single
    expected = reference(odd_mlp, momentum, sum_loss, data)
    mode = spmd.DataParallel("fully_shard", gradient_reduction=reduction)
    actual, _, model, _ = engine(odd_mlp, momentum, sum_loss, data, mode)
    assert_same(actual, expected, **MANY_STEPS)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, parameter in model.named_parameters():
        full = actual["parameters"][name]
        sizes = chunk_units(full.shape[0], ranks)
        assert parameter.to_local().shape[0] == sizes[rank]
        torch.testing.assert_close(parameter.to_local(), part(full), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "global"])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_behaviour_9_dims_that_do_not_divide(
    on_ranks: Ranks, num_ranks: int, reduction: str
) -> None:
    on_ranks(train_uneven, reduction, num_ranks=num_ranks)


def train_all_styles() -> None:
    data = batches(5)
    runs = [
        engine(mlp, adam, mean_loss, data, spmd.DataParallel(style))[0]
        for style in ("replicate", "fully_shard", "default")
    ]
    assert_same(runs[1], runs[0], **FEW_STEPS)
    assert_same(runs[2], runs[0], **FEW_STEPS)


def test_behaviour_10_styles_agree(on_ranks: Ranks) -> None:
    on_ranks(train_all_styles)


def hold_dtensors(style: str) -> None:
    data = batches(1)
    mode = spmd.DataParallel(style)
    _, _, model, optimizer = engine(mlp, adam, mean_loss, data, mode)
    placement = Shard(0) if style == "fully_shard" else Replicate()
    for parameter in model.parameters():
        assert isinstance(parameter, torch.nn.Parameter)
        assert isinstance(parameter.data, DTensor)
        assert parameter.placements == (placement,)
        assert parameter.device_mesh.ndim == 1
        state = optimizer.state[parameter]
        assert state["exp_avg"].placements == (placement,)
        assert state["exp_avg_sq"].placements == (placement,)
        assert not isinstance(state["step"], DTensor)
        assert parameter.grad.placements == (placement,)
    # 12: the optimizer's keys and groups are exactly the module's parameters.
    ours = {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} == ours
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == ours


@pytest.mark.parametrize("style", STYLES)
def test_behaviours_11_12_dtensors_in_module_and_optimizer(on_ranks: Ranks, style: str) -> None:
    on_ranks(hold_dtensors, style)


def eager_step_after_compile(style: str) -> None:
    """An eager step between compiled ones is one device's step with the same gradients."""
    data = batches(4)
    model, optimizer = built(mlp, momentum, warm=False)
    plain, plain_optimizer = built(mlp, momentum, warm=False)
    step = spmd.compile(parallel_mode=spmd.DataParallel(style))(train_step(mean_loss))
    for x in data[:2]:
        step(model, optimizer, part(x))
        train_step(mean_loss)(plain, plain_optimizer, x)
    for one in (optimizer, plain_optimizer):
        one.step()
        one.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for x in data[2:]:
        step(model, optimizer, part(x))
        train_step(mean_loss)(plain, plain_optimizer, x)
    assert_same(state_of(model, optimizer), state_of(plain, plain_optimizer), **FEW_STEPS)
    saved = optimizer.state_dict()
    assert len(saved["state"]) == len(list(model.parameters()))
    optimizer.load_state_dict(saved)
    assert set(model.state_dict()) == set(plain.state_dict())
    for x in data[:2]:
        step(model, optimizer, part(x))
        train_step(mean_loss)(plain, plain_optimizer, x)
    assert_same(state_of(model, optimizer), state_of(plain, plain_optimizer), **FEW_STEPS)


@pytest.mark.parametrize("style", STYLES)
def test_behaviour_12_eager_calls_of_the_optimizer_work(on_ranks: Ranks, style: str) -> None:
    on_ranks(eager_step_after_compile, style)


def start_differently(style: str, reduction: str, culprit: int) -> tuple[list[str], Any]:
    """Rank `culprit` changes the second layer before the first step."""
    import warnings

    data = batches(2)
    model, optimizer = built(mlp, momentum, warm=True)
    expected, expected_optimizer = built(mlp, momentum, warm=True)
    if dist.get_rank() == culprit:
        with torch.no_grad():
            model[2].weight.add_(1.0)
            optimizer.state[model[2].bias]["momentum_buffer"].add_(1.0)
    if culprit == 0:
        with torch.no_grad():
            expected[2].weight.add_(1.0)
            expected_optimizer.state[expected[2].bias]["momentum_buffer"].add_(1.0)
    mode = spmd.DataParallel(style, gradient_reduction=reduction)
    step = spmd.compile(parallel_mode=mode)(train_step(sum_loss))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in data:
            step(model, optimizer, part(x))
    if reduction == "mean":
        wrapped = torch.nn.parallel.DistributedDataParallel(expected)
        for x in data:
            train_step(sum_loss)(wrapped, expected_optimizer, part(x))
    else:
        for x in data:
            train_step(sum_loss)(expected, expected_optimizer, x)
    assert_same(state_of(model, optimizer), state_of(expected, expected_optimizer), **MANY_STEPS)
    return [str(w.message) for w in caught if "started with different" in str(w.message)]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(("style", "reduction"), [("replicate", "mean"), ("fully_shard", "global")])
def test_behaviour_13_rank_0_wins_with_a_warning(
    on_ranks: Ranks, style: str, reduction: str, culprit: int
) -> None:
    told = on_ranks(start_differently, style, reduction, culprit)

    for messages in told:
        assert len(messages) == 1
        assert "parameter '2.weight' and 1 more" in messages[0]


def count_collectives(style: str, reduction: str) -> None:
    mode = spmd.DataParallel(style, gradient_reduction=reduction)
    recorded = Recorded(mode)
    _, step, *_ = engine(mlp, adam, mean_loss, batches(3), mode)
    for graph in recorded.partitioned:
        waits = [n for n in graph.graph.nodes if "wait_tensor" in str(n.target)]
        collectives = [
            n
            for n in graph.graph.nodes
            if getattr(n.target, "namespace", None) == "_c10d_functional" and n not in waits
        ]
        assert all(len(n.users) == 1 for n in collectives)
        assert sorted(n.args[0].name for n in waits) == sorted(n.name for n in collectives)
        gradients = [n for n in collectives if "gradient" in n.meta]
        assert sorted(name for n in gradients for name in n.meta["gradient"]["names"]) == [
            "0.bias", "0.weight", "2.bias", "2.weight"
        ]  # fmt: skip
        # Under the default the loss is reduced too, under "mean" it is each rank's own.
        others = 0 if reduction == "mean" else 1
        if style == "replicate":
            assert all("all_reduce" in str(n.target) for n in gradients)
            assert count(graph, "all_reduce") == 4 + others
            assert count(graph, "all_gather_into_tensor") == 0
        else:
            assert all("reduce_scatter" in str(n.target) for n in gradients)
            assert count(graph, "reduce_scatter_tensor") == 4
            assert count(graph, "all_reduce") == others
            # Each parameter once in forward, the second weight once more in backward.
            assert count(graph, "all_gather_into_tensor") == 5
    # After the default passes, one bucket.
    name = "all_reduce" if style == "replicate" else "reduce_scatter_tensor"
    assert step.collectives.get(f"{name}_coalesced", 0) == 1
    assert step.collectives.get(name, 0) <= 1


@pytest.mark.parametrize("reduction", ["mean", "global"])
@pytest.mark.parametrize("style", STYLES)
def test_behaviours_14_15_each_gradient_is_reduced_once(
    on_ranks: Ranks, style: str, reduction: str
) -> None:
    on_ranks(count_collectives, style, reduction)


def read_a_gradient_often() -> None:
    """Adam reads a gradient in several operators; all read one wait."""
    mode = spmd.DataParallel("replicate", gradient_reduction="mean")
    recorded = Recorded(mode)
    engine(mlp, adam, mean_loss, batches(3), mode)
    gradient = next(n for n in recorded.partitioned[-1].graph.nodes if "gradient" in n.meta)
    wait = next(iter(gradient.users))
    assert len(wait.users) >= 2


def test_behaviour_14_however_often_the_optimizer_reads_it(on_ranks: Ranks) -> None:
    on_ranks(read_a_gradient_often)


def own_losses(reduction: str, loss: Any) -> tuple[float, float]:
    data = batches(1)
    mode = spmd.DataParallel("replicate", gradient_reduction=reduction)
    model, optimizer = built(mlp, sgd, warm=False)
    local = loss(model, part(data[0])).item()
    total = loss(model, data[0]).item()
    returned = spmd.compile(parallel_mode=mode)(train_step(loss))(model, optimizer, part(data[0]))
    if reduction == "mean":
        assert returned.item() == pytest.approx(local, rel=1e-6)
    else:
        assert returned.item() == pytest.approx(total, rel=1e-5)
    return returned.item(), total


def test_behaviour_19_the_returned_loss(on_ranks: Ranks) -> None:
    own = on_ranks(own_losses, "mean", sum_loss)
    assert own[0][0] != own[1][0]  # 53: the ranks' data really differ
    assert own[0][0] + own[1][0] == pytest.approx(own[0][1], rel=1e-5)
    for loss in (sum_loss, mean_loss):
        same = on_ranks(own_losses, "global", loss)
        assert same[0][0] == same[1][0]


def exact_formula(style: str) -> list[float]:
    """54: parameters after one SGD step are p - lr * mean over ranks of their gradients."""
    data = batches(1)
    model, optimizer = built(mlp, sgd, warm=False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sum_loss(model, part(data[0])).backward()
    own = {n: p.grad.clone() for n, p in model.named_parameters()}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    model.zero_grad()
    mode = spmd.DataParallel(style, gradient_reduction="mean")
    spmd.compile(parallel_mode=mode)(train_step(sum_loss))(model, optimizer, part(data[0]))
    for name, parameter in model.named_parameters():
        mean = sum(g[name] for g in gathered) / len(gathered)
        torch.testing.assert_close(whole(parameter), before[name] - 0.1 * mean)
        torch.testing.assert_close(whole(parameter.grad), mean)
    return [float(g.norm()) for g in own.values()]


@pytest.mark.parametrize("style", STYLES)
def test_behaviours_53_54_the_exact_formula(on_ranks: Ranks, style: str) -> None:
    norms = on_ranks(exact_formula, style)
    assert norms[0] != norms[1]


def dropout_draws(reduction: str) -> tuple[Any, Any]:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.Dropout(0.5))

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        out = model(x)
        out.sum().backward()
        optimizer.step()
        return out.detach()

    model, optimizer = built(make, sgd, warm=False)
    x = torch.ones(4, 10)
    if reduction == "mean":
        torch.manual_seed(100 + dist.get_rank())
    mode = spmd.DataParallel("replicate", gradient_reduction=reduction)
    compiled = spmd.compile(parallel_mode=mode)(step)
    compiled(model, optimizer, part(x))
    local = compiled.results.local[0]
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, whole(model[0].weight))
    assert all(torch.equal(w, weights[0]) for w in weights)
    return (local == 0).tolist()


def test_behaviour_55_ranks_draw_independently(on_ranks: Ranks) -> None:
    for reduction in ("mean", "global"):
        masks = on_ranks(dropout_draws, reduction)
        assert masks[0] != masks[1]
