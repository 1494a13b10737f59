"""A per-rank style that holds its promise differs in meaning; one that does not is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_verify.causes.given_gradients import GradientsGiven
from spmd_verify.examination.per_rank import repeats
from spmd_verify.examination.semantic import (
    PerRank,
    Semantic,
    combination,
    first_coupled,
    fitted,
    semantic,
)
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import StepRecord, model_snapshot

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
RANKS = 2


def _record(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor]) -> StepRecord:
    """Run one float64 step on a copy of a model."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    torch.manual_seed(5)
    with Observer(own, optimizer) as observer:
        value = loss(own, batch)
        value.backward()
        optimizer.step()
    observer.add_loss(value.detach())
    return {**observer.record, **model_snapshot(own)}


def _found(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], **changes: Any) -> PerRank:
    """Return what a right per-rank style shows: the mean over ranks of the parts' gradients."""
    model = model.double()
    parts = {
        (rank,): _record(model, loss, {n: value.chunk(RANKS)[rank] for n, value in batch.items()})
        for rank in range(RANKS)
    }
    whole = _record(model, loss, batch)
    names = list(whole["gradients"])
    found = PerRank(
        style="ddp",
        reference=whole,
        parts=parts,
        weights=dict.fromkeys(parts, 1.0 / RANKS),
        gradients={},
        held={
            at: {"loss": record["loss"], "buffers": record["buffers"]}
            for at, record in parts.items()
        },
        noise={("gradients", name): 1e-15 for name in names},
        dtype="float64",
        classes={name or "model": type(module).__name__ for name, module in model.named_modules()},
    )
    zeros = {name: torch.zeros_like(value) for name, value in whole["gradients"].items()}
    empty = replace(found, gradients=zeros)
    gradients = {name: combination(empty, name) for name in names}
    return replace(found, **{"gradients": gradients, **changes})


def _inputs(rows: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 6, dtype=torch.float64)}


def _mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _said(found: PerRank) -> Semantic:
    meaning = semantic(found)
    assert meaning is not None
    assert meaning.residual <= 4.0
    assert meaning.remedy
    return meaning


def test_a_model_whose_parts_compose_is_no_matter_of_meaning() -> None:
    assert semantic(_found(_linear(), _mean, _inputs())) is None


def test_batch_statistics_name_the_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    meaning = _said(_found(model, _mean, _inputs()))

    assert meaning.kind == "batch_statistics"
    assert "1 (BatchNorm1d)" in meaning.text
    assert "SyncBatchNorm" in meaning.remedy
    assert meaning.tensors[0] == "1"
    assert "0.weight" in meaning.tensors


def test_the_rounding_of_the_parts_counts_where_it_is_larger_than_the_whole_batchs() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    found = _found(model, _mean, _inputs())
    off = {n: v + 1e-9 * torch.ones_like(v) for n, v in found.gradients.items()}
    rounded = {
        at: {**record, "gradients": {n: v - 1e-9 for n, v in record["gradients"].items()}}
        for at, record in found.parts.items()
    }

    assert semantic(replace(found, gradients=off)) is None
    assert _said(replace(found, gradients=off, rounded=rounded)).kind == "batch_statistics"
    wrong = {n: v + 1e-6 for n, v in found.gradients.items()}
    assert semantic(replace(found, gradients=wrong, rounded=rounded)) is None


class Whitened(nn.Module):
    """A batch norm by another name, with a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.1)  # type: ignore[operator]
        return (x - x.mean(0)) / x.std(0)


def test_ranks_that_repeat_a_part_do_not_hide_the_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    found = _found(model, _mean, _inputs())
    # Two ranks of an axis tp have each part.
    twice = {(dp, tp): found.parts[(dp,)] for dp in range(RANKS) for tp in range(2)}
    again = repeats({"dp": RANKS, "tp": 2}, [[(0, 0), (0, 1)], [(1, 0), (1, 1)]])

    meaning = _said(
        replace(
            found,
            parts=twice,
            weights=dict.fromkeys(twice, 0.25),
            held={at: found.held[at[:1]] for at in twice},
            repeats=again,
        )
    )

    assert again == {(0, 1), (1, 1)}
    assert (meaning.kind, meaning.tensors[0]) == ("batch_statistics", "1")


class Packed(nn.Module):
    """Gives its rows in the order of their size, and that order: indices within the part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.order = Order()

    def forward(self, x: Tensor) -> Tensor:
        rows, index = self.order(x)
        return self.inner(rows)[index.argsort()]


class Order(nn.Module):
    """Sorts rows by their first feature."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x[:, 0].argsort()
        return x[index], index


def test_indices_within_a_part_couple_no_samples() -> None:
    torch.manual_seed(0)
    assert first_coupled(_found(Packed(), _mean, _inputs()), None) is None

    weights = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    found = _found(Packed(), _weighted, {**_inputs(), "w": weights})
    assert _said(found).kind == "mean_of_means"


def _weighted(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    rows = model(batch["x"]).square().sum(1)
    return (rows * batch["w"]).sum() / batch["w"].sum()


def test_equal_samples_on_two_data_ranks_are_two_parts() -> None:
    assert repeats({"dp": 2, "tp": 2}, [[(0, 0), (0, 1), (1, 0), (1, 1)]]) == {(0, 1), (1, 1)}


def test_batch_statistics_are_known_by_their_buffers() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Whitened(), nn.Linear(5, 3))

    assert _said(_found(model, _mean, _inputs())).kind == "batch_statistics"


class Centred(nn.Module):
    """Couples samples and keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_layer_that_couples_samples_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 5), Centred(), nn.Linear(5, 3))

    meaning = _said(_found(model, _mean, _inputs()))

    assert (meaning.kind, meaning.tensors[0]) == ("cross_sample", "1")
    assert "1 (Centred)" in meaning.text


def test_a_loss_that_couples_samples() -> None:
    def contrastive(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        out = F.normalize(model(batch["x"]), dim=1)
        return F.cross_entropy(out @ out.T / 0.1, torch.arange(len(out)))

    meaning = _said(_found(_linear(), contrastive, _inputs()))

    assert (meaning.kind, meaning.tensors[0]) == ("cross_sample", "loss")


def test_random_numbers_name_region_and_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))

    meaning = _said(_found(model, _mean, _inputs(), draws=["bernoulli_ at model.py:7"]))

    assert meaning.kind == "random_stream"
    assert "1 (Dropout)" in meaning.text


def test_unequal_denominators_are_counted() -> None:
    def per_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)

    labels = torch.tensor([0, 1, 2, 0, 1, -100, -100, -100])
    meaning = _said(_found(_linear(), per_token, {**_inputs(), "labels": labels}))

    assert meaning.kind == "mean_of_means"
    assert "as 4 : 1" in meaning.text
    assert "4/5, 1/5" in meaning.text


def test_a_loss_summed_over_samples_is_a_factor() -> None:
    def summed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().sum()

    meaning = _said(_found(_linear(), summed, _inputs()))

    assert meaning.kind == "factor"
    assert meaning.factor == pytest.approx(0.5)
    assert "0.5 x the reference" in meaning.text


NORM = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("factor", [2.0, 1.0 + 1e-9])
def test_gradients_that_are_not_the_mean_over_ranks_stay_a_mismatch(factor: float) -> None:
    found = _found(NORM, _mean, _inputs())
    wrong = {**found.gradients, "0.weight": found.gradients["0.weight"] * factor}

    assert semantic(replace(found, gradients=wrong)) is None


def test_a_part_that_counts_twice_stays_a_mismatch() -> None:
    found = _found(NORM, _mean, _inputs())
    weights = {(0,): 1.0, (1,): 0.5}
    wrong = {name: combination(replace(found, weights=weights), name) for name in found.gradients}

    assert semantic(replace(found, gradients=wrong)) is None


@pytest.mark.parametrize("stage", ["loss", "buffers"])
def test_what_a_rank_holds_besides_must_be_its_own(stage: str) -> None:
    found = _found(NORM, _mean, _inputs())
    held = {
        at: {s: dict(named) for s, named in stages.items()} for at, stages in found.held.items()
    }
    name = next(n for n in held[1,][stage] if "tracked" not in n)
    held[1,][stage][name] = held[1,][stage][name] * 1.01

    assert semantic(replace(found, held=held)) is None


def test_buffers_may_be_the_first_ranks_and_a_loss_may_be_reduced() -> None:
    found = _found(NORM, _mean, _inputs())
    first = found.parts[0,]
    losses = [record["loss"]["loss"] for record in found.parts.values()]
    reduced = {"loss": torch.stack(losses).mean()}
    held = {at: {"loss": reduced, "buffers": first["buffers"]} for at in found.parts}

    assert semantic(replace(found, held=held)) is not None


def test_one_part_alone_says_nothing() -> None:
    found = _found(NORM, _mean, _inputs())

    assert semantic(replace(found, parts={(0,): found.parts[0,]})) is None
    assert semantic(replace(found, gradients={})) is None


def test_rows_may_lie_anywhere_in_an_output() -> None:
    torch.manual_seed(0)

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(len(x), 3, 2).transpose(0, 1).reshape(-1, 2)
            return self.inner(rows)

    found = _found(SequenceFirst(), _mean, _inputs())

    assert first_coupled(found, fitted(found)) is None


def test_micro_batches_are_taken_together() -> None:
    def accumulated(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        chunks = batch["x"].chunk(2)
        return torch.stack([model(chunk).square().mean() for chunk in chunks]).mean()

    found = _found(_linear(), accumulated, _inputs())

    assert first_coupled(found, fitted(found)) is None
    assert semantic(found) is None


def test_gradients_are_given_after_every_backward_and_not_after_an_update() -> None:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    due = {name: torch.full_like(value, 0.25) for name, value in before.items()}

    with GradientsGiven(model, optimizer, due) as given:
        for _ in range(2):
            _mean(model, {"x": torch.ones(4, 6)}).backward()
        optimizer.step()

    assert given.problem() is None
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[name] - 0.25)
    with GradientsGiven(model, optimizer, due) as given:
        optimizer.step()
        _mean(model, {"x": torch.ones(4, 6)}).backward()
    assert "backward after an update" in str(given.problem())
    with GradientsGiven(model, optimizer, {**due, "other": torch.ones(1)}) as given:
        _mean(model, {"x": torch.ones(4, 6)}).backward()
    assert "no gradient of other" in str(given.problem())
