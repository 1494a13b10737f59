"""Hazards H1-H16 of the original: for each, what the fault would compute is not what we do.

Every test holds the right result (one device), the result the hazard would give, written
out by hand, and the engine's. The engine must be the first and clearly not the second, so
the test would fail on the hazard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranked import Ranks
from torch import Tensor, nn
from training import batches, part, train_step, whole

import spmd.lockstep

Parameters = dict[str, Tensor]
RANKS = 2
MODES = {
    "replicate": lambda: spmd.DataParallel("replicate"),
    "fully_shard": lambda: spmd.DataParallel("fully_shard"),
    "default": lambda: spmd.DataParallel("default"),
    "expand": spmd.DTensorExpandMode,
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def run(
    make: Callable[[], nn.Module],
    step: Callable[..., Any],
    data: list[Tensor],
    make_optimizer: Callable[..., Any] = sgd,
    wrap: Callable[..., Any] | None = None,
) -> Parameters:
    """Train from seed 0 in float64 and return parameters and buffers by name."""
    torch.manual_seed(0)
    model = make().double()
    optimizer = make_optimizer(model.parameters())
    called = wrap(step) if wrap is not None else step
    torch.manual_seed(1)
    for x in data:
        called(model, optimizer, x.double() if x.is_floating_point() else x)
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


def assert_right(
    right: Parameters,
    wrong: Parameters,
    make: Callable[[], nn.Module],
    step: Callable[..., Any],
    data: list[Tensor],
    make_optimizer: Callable[..., Any] = sgd,
) -> None:
    """Check that the hazard shows in `wrong`, and that every mode gives `right`."""
    assert far(wrong, right), "the hazard does not show: the test proves nothing"
    captures = spmd.lockstep.CaptureCache()
    for name, mode in MODES.items():
        compiled = spmd.lockstep.compile(
            parallel_mode=mode(), mesh={"dp": RANKS}, captures=captures
        )
        actual = run(make, step, data, make_optimizer, compiled)
        assert not far(actual, right), name
        assert far(actual, wrong), name


def far(one: Parameters, other: Parameters) -> bool:
    """Return whether any value differs beyond rounding of float64."""
    return any(not torch.allclose(one[n].double(), other[n].double(), 1e-10, 1e-12) for n in other)


def scaled(factor: float) -> Callable[..., Tensor]:
    """Return a step whose gradients are wrong by a factor."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, x)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        return loss.detach()

    return step


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_h1_tied_parameters_are_updated_once() -> None:
    def twice(parameters: Any) -> Any:
        listed = list(parameters)
        return torch.optim.SGD([{"params": listed}, {"params": []}], lr=0.1)

    def double_update(model: Any, optimizer: Any, x: Tensor) -> None:
        train_step(mean_loss)(model, optimizer, x)
        with torch.no_grad():
            model.first.weight.sub_(0.1 * model.first.weight.grad)

    step, data = train_step(mean_loss), batches(2)
    right = run(Tied, step, data, twice)
    assert torch.equal(right["first.weight"], right["second.weight"])
    assert_right(right, run(Tied, double_update, data, twice), Tied, step, data, twice)


@pytest.mark.parametrize("factor", [1 / RANKS, RANKS])
def test_h2_mean_loss_is_not_off_by_the_number_of_ranks(factor: float) -> None:
    step, data = train_step(mean_loss), batches(2)
    assert_right(run(linear, step, data), run(linear, scaled(factor), data), linear, step, data)


class Square(nn.Module):
    """Everything is 8: batch, features, and a table with no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(64.0).reshape(8, 8) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table.sum(0) + self.fc.weight.t() @ x.t() @ x


def test_h3_a_dim_that_happens_to_have_the_batch_size() -> None:
    def local_table(model: Any, optimizer: Any, x: Tensor) -> None:
        """The table is taken for a batch: each rank sums its own rows."""
        optimizer.zero_grad()
        losses = []
        for rank, rows in enumerate(x.chunk(RANKS)):
            table = model.table.chunk(RANKS)[rank].sum(0)
            out = model.fc(rows) * table + (model.fc.weight.t() @ x.t() @ x)[: len(rows)]
            losses.append(out.square().mean())
        (sum(losses) / RANKS).backward()
        optimizer.step()

    step = train_step(mean_loss)
    data = batches(2, rows=8, width=8)
    right, wrong = run(Square, step, data), run(Square, local_table, data)
    assert_right(right, wrong, Square, step, data)


def test_h4_another_batch_size_is_not_run_on_the_old_graph() -> None:
    step = train_step(mean_loss)
    data = [*batches(3), torch.ones(6, 10), torch.ones(7, 10) * 2, torch.ones(1, 10)]

    def stale(model: Any, optimizer: Any, x: Tensor) -> None:
        """The number of elements of the first batch is baked into the mean."""
        optimizer.zero_grad()
        (model(x).square().sum() / (8 * 4)).backward()
        optimizer.step()

    assert_right(run(linear, step, data), run(linear, stale, data), linear, step, data)


class Uneven(nn.Module):
    """Three rows over two ranks, one row, and no dim at all."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.one = nn.Linear(10, 3), nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(len(x))
        return self.scale * self.one(torch.tanh(self.odd(x)))


def test_h5_rows_that_do_not_divide_and_0_dim_values() -> None:
    def last_row_lost(model: Any, optimizer: Any, x: Tensor) -> None:
        kept = model.odd.weight[2].detach().clone()
        train_step(mean_loss)(model, optimizer, x)
        with torch.no_grad():
            model.odd.weight[2] = kept

    step, data = train_step(mean_loss), batches(3)
    right = run(Uneven, step, data)
    assert right["seen"].item() == 24
    assert_right(right, run(Uneven, last_row_lost, data), Uneven, step, data)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4)
        self.again = nn.Conv1d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.relu(self.norm(self.conv(x.unsqueeze(1)))))


def test_h6_buffers_and_convolutions() -> None:
    def own_statistics(model: Any, optimizer: Any, x: Tensor) -> None:
        """Each rank normalises with the statistics of its own part."""
        optimizer.zero_grad()
        sum(mean_loss(model, p) for p in x.chunk(RANKS)).div(RANKS).backward()
        optimizer.step()

    step, data = train_step(mean_loss), batches(2)
    right, wrong = run(Conv, step, data), run(Conv, own_statistics, data)
    assert far({"m": wrong["norm.running_mean"]}, {"m": right["norm.running_mean"]})
    assert_right(right, wrong, Conv, step, data)


@pytest.mark.parametrize("kind", ["clip", "accumulate", "unscale"])
def test_h7_operators_between_gradient_and_optimizer(kind: str) -> None:
    def change(model: Any, local: bool) -> None:
        if kind == "clip" and not local:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if kind == "unscale":
            for p in model.parameters():
                p.grad.mul_(1 / 64)

    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2 if kind == "accumulate" else 1):
            (mean_loss(model, x) * (64 if kind == "unscale" else 1)).backward()
        change(model, local=False)
        optimizer.step()

    def per_rank(model: Any, optimizer: Any, x: Tensor) -> None:
        """Each rank clips its own gradient; only the last backward counts; scale twice."""
        optimizer.zero_grad()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rows in x.chunk(RANKS):
            model.zero_grad()
            mean_loss(model, rows).backward()
            if kind == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for t, p in zip(total, model.parameters(), strict=True):
                t.add_(p.grad / RANKS)
        for t, p in zip(total, model.parameters(), strict=True):
            p.grad = t / 64 if kind == "unscale" else t
        optimizer.step()

    data = batches(2)
    assert_right(run(linear, step, data), run(linear, per_rank, data), linear, step, data)


class Pooled(nn.Module):
    """A sum over the batch goes into a non-linear operator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc(x).sum(0)))


def test_h8_a_partial_sum_is_reduced_before_a_non_linear_operator() -> None:
    def relu_of_parts(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        parts = [F.relu(model.fc(rows).sum(0)) for rows in x.chunk(RANKS)]
        model.out(sum(parts)).square().mean().backward()
        optimizer.step()

    step, data = train_step(mean_loss), batches(2)
    assert_right(run(Pooled, step, data), run(Pooled, relu_of_parts, data), Pooled, step, data)


def decayed_loss(model: nn.Module, x: Tensor, times: int = 1) -> Tensor:
    decay = sum(p.square().sum() for p in model.parameters())
    return mean_loss(model, x) + 0.1 * times * decay


def test_h9_a_regulariser_on_the_weights_counts_once() -> None:
    def counted_per_rank(model: Any, optimizer: Any, x: Tensor) -> Any:
        return train_step(lambda m, x: decayed_loss(m, x, RANKS))(model, optimizer, x)

    step, data = train_step(decayed_loss), batches(2)
    right, wrong = run(linear, step, data), run(linear, counted_per_rank, data)
    assert_right(right, wrong, linear, step, data)


def averaged_on_gloo() -> None:
    torch.manual_seed(0)
    model = linear()
    optimizer = sgd(model.parameters())
    x = part(batches(1)[0]) + 10 * dist.get_rank()
    (mean_loss(model, x)).backward()
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {n: p.grad for n, p in model.named_parameters()})
    model.zero_grad()
    mode = spmd.DataParallel("fully_shard", gradient_reduction="mean")
    spmd.compile(parallel_mode=mode)(train_step(mean_loss))(model, optimizer, x)
    for name, parameter in model.named_parameters():
        actual = whole(parameter.grad)
        torch.testing.assert_close(actual, (gathered[0][name] + gathered[1][name]) / 2)
        for wrong in (gathered[0][name] + gathered[1][name], gathered[dist.get_rank()][name]):
            assert not torch.allclose(actual, wrong, 1e-3)


@pytest.mark.dist
def test_h10_gradients_are_averaged_on_gloo(on_ranks: Ranks) -> None:
    on_ranks(averaged_on_gloo)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5)


def test_h11_dropout_draws_what_one_device_draws() -> None:
    def same_mask(model: Any, optimizer: Any, x: Tensor) -> None:
        """Every rank draws the first numbers of the stream for its own rows."""
        optimizer.zero_grad()
        out = model.fc(x)
        mask = F.dropout(torch.ones_like(out[: len(out) // RANKS]), 0.5).repeat(RANKS, 1)
        (out * mask).square().mean().backward()
        optimizer.step()

    step, data = train_step(mean_loss), batches(2)
    assert_right(run(Dropped, step, data), run(Dropped, same_mask, data), Dropped, step, data)


def frozen() -> nn.Module:
    model = linear()
    model[0].weight.requires_grad_(False)
    return model


def test_h12_frozen_and_unlisted_parameters_do_not_move() -> None:
    def some(parameters: Any) -> Any:
        return torch.optim.SGD(list(parameters)[:3], lr=0.1, weight_decay=0.1)

    def every(model: Any, optimizer: Any, x: Tensor) -> None:
        """The frozen one decays, the unlisted one is updated."""
        train_step(mean_loss)(model, optimizer, x)
        with torch.no_grad():
            model[0].weight.mul_(1 - 0.01)
            model[2].bias.sub_(0.1 * model[2].bias.grad)

    def step(model: Any, optimizer: Any, x: Tensor) -> None:
        train_step(mean_loss)(model, optimizer, x)
        model.zero_grad()

    data = batches(3)
    wrong = run(frozen, every, data, some)
    assert_right(run(frozen, step, data, some), wrong, frozen, step, data, some)


def test_h13_each_group_keeps_its_own_hyper_parameters() -> None:
    def groups(parameters: Any, lr: float = 0.3) -> Any:
        listed = list(parameters)
        return torch.optim.SGD(
            [{"params": listed[:1]}, {"params": listed[1:], "lr": lr, "momentum": 0.5}], lr=0.1
        )

    def first_group_for_all(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1)

    step, data = train_step(mean_loss), batches(3)
    wrong = run(linear, step, data, first_group_for_all)
    assert_right(run(linear, step, data, groups), wrong, linear, step, data, groups)


OPTIMIZERS = {
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_h14_no_update_is_deleted(name: str) -> None:
    def without(model: Any, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        mean_loss(model, x).backward()

    step, data, make = train_step(mean_loss), batches(3), OPTIMIZERS[name]
    wrong = run(linear, without, data, make)
    assert_right(run(linear, step, data, make), wrong, linear, step, data, make)


def test_h15_step_counts_are_read_at_every_call() -> None:
    def single(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01, foreach=False)

    def baked(model: Any, optimizer: Any, x: Tensor) -> None:
        """The count at capture stays: every step is corrected like the second."""
        train_step(mean_loss)(model, optimizer, x)
        for state in optimizer.state.values():
            state["step"].clamp_(max=1.0)

    step, data = train_step(mean_loss), batches(6)
    wrong = run(linear, baked, data, single)
    assert_right(run(linear, step, data, single), wrong, linear, step, data, single)


class Masked(nn.Module):
    """Backward operators with outputs nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, bias=False)
        self.norm, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 4)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.group(self.norm(self.conv(x.unsqueeze(1))))


def test_h16_outputs_that_are_none() -> None:
    def weight_lost(model: Any, optimizer: Any, x: Tensor) -> None:
        kept = model.conv.weight.detach().clone()
        train_step(mean_loss)(model, optimizer, x)
        with torch.no_grad():
            model.conv.weight.copy_(kept)

    step, data = train_step(mean_loss), batches(2)
    right = run(Masked, step, data)
    compiled = spmd.lockstep.compile(mesh={"dp": RANKS})(step)
    run(Masked, step, data, wrap=lambda _: compiled)
    values = [n.meta.get("val") for n in compiled.program.graph.graph.nodes]
    assert any(_is_mixed(value) for value in values)
    assert_right(right, run(Masked, weight_lost, data), Masked, step, data)


def _is_mixed(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(item is None for item in value)
