"""Names, state and how a run is put back."""

import pytest
import torch
from torch import nn

from spmd_verify.reference.trajectory import (
    first_difference,
    flatten,
    hyper_parameters,
    named_parameters,
    normalised,
    restore,
    restore_hyper_parameters,
    same_bits,
    snapshot,
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("module.net.0.weight", "net.0.weight"),
        ("_orig_mod.module.weight", "weight"),
        ("net._fsdp_wrapped_module.weight", "net.weight"),
        ("net._checkpoint_wrapped_module", "net"),
        ("net.module.weight", "net.module.weight"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrappers_are_stripped_from_names(raw: str, expected: str) -> None:
    assert normalised(raw) == expected


def test_a_tied_parameter_has_its_first_name_and_an_alias() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    names, aliases = named_parameters(model)
    assert list(names) == ["a.weight", "a.bias", "b.bias"]
    assert aliases == {"a.weight": ("b.weight",)}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adagrad(p),
    ],
)
def test_a_restored_run_repeats_its_step_bit_for_bit(make) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer, batch = make(list(model.parameters())), torch.randn(6, 3)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    before, numbers = snapshot(model, optimizer), hyper_parameters(optimizer)
    step()
    once = snapshot(model, optimizer)
    step()
    restore(model, optimizer, before)
    restore_hyper_parameters(optimizer, numbers)
    step()
    assert first_difference([once], [snapshot(model, optimizer)]) is None


def test_hyper_parameters_are_named_by_group() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(
        [{"params": first.parameters()}, {"params": second.parameters(), "lr": 5.0}]
    )
    found = hyper_parameters(optimizer)
    assert found["param_groups[1].lr"] == 5.0
    assert found["param_groups[0].betas[1]"] == 0.999
    restore_hyper_parameters(optimizer, {**found, "param_groups[1].lr": 7.0})
    assert [g["lr"] for g in optimizer.param_groups] == [0.001, 7.0]


def test_optimizer_state_is_named_by_parameter_and_key() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = snapshot(model, optimizer)["optimizer_state"]
    assert sorted(state)[:3] == ["bias.exp_avg", "bias.exp_avg_sq", "bias.step"]


def test_containers_are_flattened_with_their_paths() -> None:
    x = torch.zeros(1)
    value = {"a": [x, (x,)], "b": {"c": x}, "d": 3}
    assert [path for path, _ in flatten(value, "model")] == [
        "model.a[0]",
        "model.a[1][0]",
        "model.b.c",
    ]


def test_equal_nan_is_the_same_and_another_dtype_is_not() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert same_bits(x, x.clone())
    assert not same_bits(x, x.double())
    assert not same_bits(x, torch.tensor([torch.nan, 1.0]))
    assert not same_bits(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
