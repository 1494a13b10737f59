"""What runs on one device do otherwise than their case."""

from __future__ import annotations

import torch
from torch import nn

from spmd_verify.causes.interventions import (
    IN,
    OUT,
    CountingLocally,
    gradients_changed,
    outputs_changed,
    parameters_changed,
    part_of,
)


class _Tied(nn.Module):
    """Two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_parameter_is_changed_in_all_its_uses_by_its_first_name() -> None:
    model, x = _Tied(), torch.ones(1, 3)
    before = model(x)
    with parameters_changed({"first.weight": lambda value: 2.0 * value})(model):
        assert torch.allclose(model(x), 4.0 * before)


def test_a_tied_parameter_is_changed_in_one_use_by_its_other_name() -> None:
    model, x = _Tied(), torch.ones(1, 3)
    before, inner = model(x), model.first(x)
    with parameters_changed({"second.weight": lambda value: 2.0 * value})(model):
        assert torch.allclose(model(x), 2.0 * before)
        assert torch.equal(model.first(x), inner)


def test_an_output_is_changed_and_backward_goes_through_the_change() -> None:
    model, x = _Tied(), torch.ones(1, 3, requires_grad=True)
    model(x).sum().backward()
    whole = x.grad
    assert whole is not None
    x.grad = None
    with outputs_changed({"first": lambda value: 3.0 * value})(model):
        model(x).sum().backward()
    assert torch.allclose(x.grad, 3.0 * whole)


def test_a_gradient_is_changed_where_it_leaves_and_where_it_enters_a_module() -> None:
    for side in (IN, OUT):
        model, x = _Tied(), torch.ones(1, 3, requires_grad=True)
        model(x).sum().backward()
        whole = x.grad
        assert whole is not None
        x.grad = None
        with gradients_changed({("second", side): lambda gradient: 5.0 * gradient})(model):
            found = model(x)
            found.sum().backward()
        assert torch.allclose(x.grad, 5.0 * whole)
        assert torch.equal(found, model(x))


def test_nothing_is_changed_behind_an_intervention() -> None:
    model, x = _Tied(), torch.ones(1, 3)
    before = model(x)
    with outputs_changed({"first": torch.zeros_like})(model):
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)


def test_ranges_of_one_length_start_again_in_every_part() -> None:
    with CountingLocally(2, 8) as mode:
        assert torch.arange(8).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert torch.arange(1, 9).tolist() == list(range(1, 9))
    assert mode.lengths == {4, 8}
    assert torch.arange(8).tolist() == list(range(8))


def test_a_part_keeps_its_place() -> None:
    value = torch.arange(1.0, 7.0)
    kept = [part_of(rank, 3, 0)(value) for rank in range(3)]
    assert kept[1].tolist() == [0, 0, 3, 4, 0, 0]
    assert torch.equal(sum(kept), value)
