"""Random rounding: what a perturbed operator may move, and by how much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_verify.noise import rounding
from spmd_verify.noise.rounding import MARGINAL_TERMS, RandomRounding

U = 2.0**-24


def _large_operands() -> tuple[Tensor, Tensor]:
    """Return operands of a product with rows and columns of very different size."""
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(64, 160, generator=generator) * torch.logspace(-3, 2, 64)[:, None]
    right = torch.randn(160, 144, generator=generator) * torch.logspace(-2, 1, 144)
    assert MARGINAL_TERMS <= 64 * 160 * 144
    return left, right


def _errors(function: object, repeats: int = 300) -> Tensor:
    """Return what perturbation does to a result, float64 [repeats, ...]."""
    assert callable(function)
    with torch.no_grad():
        plain = function().to(torch.float64)
        found = []
        for seed in range(repeats):
            with RandomRounding(seed, torch.float32):
                found.append(function().to(torch.float64) - plain)
    return torch.stack(found)


@pytest.mark.parametrize("has_bias", [False, True])
def test_row_and_column_sums_give_the_noise_of_the_terms(has_bias: bool) -> None:
    """Of a large product every row and every column moves as much as rounding its terms does."""
    left, right = _large_operands()
    bias = torch.randn(144, generator=torch.Generator().manual_seed(4)) if has_bias else None
    errors = _errors(lambda: left @ right if bias is None else torch.addmm(bias, left, right))
    variance = left.double().square() @ right.double().square()
    variance += 0.0 if bias is None else bias.double().square()
    expected = variance * (rounding.TERM_DEVIATION * U) ** 2
    for dim in (0, 1):
        ratio = (errors.square().mean(0).sum(dim) / expected.sum(dim)).sqrt()
        assert float(ratio.min()) > 0.8
        assert float(ratio.max()) < 1.25


def test_whole_numbers_and_infinities_stay() -> None:
    """Counts stay exact, masked scores stay masked, in small and in large tensors."""
    for size in (12, 3 * (1 << 16) + 5):
        counts = torch.arange(size, dtype=torch.float32) % 7
        masks = torch.where(counts > 3, -torch.inf, 0.3)
        assert not _errors(lambda counts=counts: counts + 1.0, 2).any()
        with RandomRounding(1, torch.float32):
            moved = masks + 0.25
        assert torch.equal(moved.isinf(), masks.isinf())
        assert not moved.isnan().any()
    assert bool((moved != masks + 0.25).any())


def test_results_in_another_order_of_memory_move() -> None:
    """A large result whose memory is not in the order of its dims is perturbed in place."""
    value = torch.rand(3, 400, 300).transpose(1, 2)
    errors = _errors(lambda: value * 1.0, 2)
    assert 0.1 < float((errors != 0).double().mean()) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_norm_moves_as_its_decomposition_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calling its parts directly gives the noise that torch's decomposition has."""
    generator = torch.Generator().manual_seed(5)
    source, weight, bias, up = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((6, 5, 32), (32,), (32,), (6, 5, 32))
    )

    def noise() -> list[float]:
        found: list[list[Tensor]] = []
        for seed in range(41):
            leaves = [value.clone().requires_grad_() for value in (source, weight, bias)]
            mode = RandomRounding(seed, dtype)
            with mode if seed else torch.enable_grad():
                result = F.layer_norm(leaves[0], (32,), leaves[1], leaves[2])
                result.backward(up)
            found.append(
                [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
            )
        return [
            float(torch.stack([(a - b).square().mean() for a in rest]).mean().sqrt())
            for b, *rest in zip(*found, strict=True)
        ]

    direct = noise()
    monkeypatch.setattr(rounding, "_LAYER_NORM", {})
    for one, other in zip(direct, noise(), strict=True):
        assert one == pytest.approx(other, rel=0.15)
        assert other > 0.0
