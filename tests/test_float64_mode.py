"""The float64 twin draws what the case's dtype draws, or is declared absent."""

from typing import Any

import pytest
import torch
from judging_cases import make_case
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_verify.reference.float64_mode import CaseDtypeDraws, is_random, note_island
from spmd_verify.reference.single import SingleDevice, make_reference
from spmd_verify.reference.trajectory import first_difference

DRAWS = {
    "randn": lambda x: torch.randn(64).to(x.dtype),
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(33, dtype=x.dtype),
    "dropout": lambda x: F.dropout(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_dropout": lambda x: F.dropout2d(x.reshape(1, 8, 3, 5), 0.4),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x.reshape(12, 10), hard=True),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 7),
    "randint": lambda x: torch.randint(0, 9, (20,)),
    "randperm": lambda x: torch.randperm(20),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_case_dtype(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(120).to(dtype)
    torch.manual_seed(3)
    expected = DRAWS[name](x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with CaseDtypeDraws(dtype):
        found = DRAWS[name](x.double())
    assert torch.equal(torch.get_rng_state(), state)
    assert found.dtype in (torch.float64, torch.int64)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_without_the_mode_float64_draws_other_numbers() -> None:
    """The fault the mode exists for."""
    x = torch.randn(120)
    torch.manual_seed(3)
    expected = torch.randn_like(x)
    torch.manual_seed(3)
    assert not torch.allclose(torch.randn_like(x.double()).float(), expected)


def test_attention_without_dropout_is_computed_in_float64() -> None:
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, q, q)
    with CaseDtypeDraws(torch.float32):
        found = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(found, expected)
    assert not is_random(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)


class Island(nn.Module):
    """Computes its softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().softmax(-1).to(x.dtype)


class Factories(nn.Module):
    """Makes state, positions and constants without naming a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 5) + torch.linspace(0, 1, 5) + torch.tensor(1 / 3)
        return self.linear(x) * state + torch.full((5,), 0.1) @ torch.eye(5)


class Stubborn(nn.Module):
    """Draws from the generator as often as its dtype has bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.element_size()):
            y = torch.rand(3)
        return self.linear(x) + 0 * y.sum()


class Refuses(nn.Module):
    """Raises in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float64 is not for me")
        return self.linear(x)


def _hooks(model: type[nn.Module]) -> dict[str, Any]:
    return {"model": model, "inputs": lambda: [torch.randn(8, 12)]}


def test_factories_without_a_dtype_give_float64() -> None:
    _, reference = make_reference(make_case("own", dtype="float32", **_hooks(Factories)))
    assert reference.exact is not None
    assert not reference.islands
    loss = reference.exact.steps[0]["loss"]["loss"]
    assert loss.dtype == torch.float64
    by_hand = SingleDevice(make_case("own", dtype="float64", **_hooks(Factories))).run()
    model = by_hand.steps[0]["initial_state"]["linear.weight"]
    assert model.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_float32_islands_are_found_and_named() -> None:
    _, reference = make_reference(make_case("own", dtype="float32", **_hooks(Island)))
    assert reference.islands
    assert all(
        "test_float64_mode.py" in place or "backward" in place for place in reference.islands
    )


def test_a_coarser_result_is_an_island_and_a_step_count_is_none() -> None:
    islands: dict[str, None] = {}
    note_island(islands, torch.ops.aten.add.Tensor, torch.zeros(()), torch.float64)
    assert not islands
    note_island(islands, torch.ops.aten.add.Tensor, torch.zeros(3), torch.float64)
    assert len(islands) == 1


def test_another_generator_state_makes_the_float64_reference_absent() -> None:
    _, reference = make_reference(make_case("own", dtype="float32", **_hooks(Stubborn)))
    assert reference.exact is None
    assert reference.anchored is None
    assert "draws" in str(reference.absent) or "rand" in str(reference.absent)


def test_a_float64_run_that_raises_is_absent_with_the_reason() -> None:
    _, reference = make_reference(make_case("own", dtype="float32", **_hooks(Refuses)))
    assert reference.exact is None
    assert "float64 is not for me" in str(reference.absent)


def test_the_twin_of_a_dropout_model_differs_only_by_rounding() -> None:
    _, reference = make_reference(make_case("dropout", dtype="float32"))
    assert reference.exact is not None
    for step, exact in zip(reference.run.steps, reference.exact.steps, strict=True):
        assert float((step["loss"]["loss"] - exact["loss"]["loss"]).abs()) < 1e-6
    assert first_difference(reference.run.steps, reference.run.steps) is None
