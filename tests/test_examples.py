"""The shipped examples train on one device in both dtypes."""

from pathlib import Path

import pytest
import torch

from spmd_verify.cases.case import load_case

EXAMPLES = ["mlp", "transformer", "conv", "conv_groupnorm", "moe", "recurrent"]


def test_all_examples_are_listed(root: Path) -> None:
    assert {path.stem for path in (root / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(root: Path, name: str, dtype: str) -> None:
    case = load_case(str(root / "examples" / f"{name}.py"), dtype=dtype)
    model = case.build_model()
    optimizer = case.optimizer(model)
    for step in range(3):
        case.seed_step(step)
        assert torch.isfinite(case.step(model, optimizer, case.batch(step)))

    assert case.batch_size == 8
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_transformer_ties_its_embeddings_and_ignores_unequal_tokens(root: Path) -> None:
    case = load_case(str(root / "examples/transformer.py"))
    model = case.build_model()
    counts = (case.targets(0) != -100).sum(1)

    assert model.head.weight is model.tokens.weight
    assert len(set(counts.tolist())) > 1
