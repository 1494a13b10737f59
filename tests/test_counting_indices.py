"""Which index tensors are proved to count, and what a lookup by them does to a split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.rules.iota import counting_dim

ROWS = 6


def traced_dim(function: Callable[[Tensor], Tensor]) -> int | None:
    graph = make_fx(function, tracing_mode="fake")(torch.zeros(ROWS, 4))
    output = next(n for n in graph.graph.nodes if n.op == "output")
    return counting_dim(output.args[0])


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (lambda x: torch.arange(ROWS), 0),
        (lambda x: torch.arange(0, ROWS), 0),
        (lambda x: torch.arange(ROWS)[:, None, None], 0),
        (lambda x: torch.arange(ROWS)[None, :], 1),
        (lambda x: torch.arange(ROWS)[:, None].expand(ROWS, 4), 0),
        (lambda x: torch.arange(ROWS)[None, :].expand(ROWS, ROWS), 1),
        (lambda x: torch.arange(ROWS).view(1, ROWS, 1) + 0, 1),
        (lambda x: torch.arange(ROWS, dtype=torch.int32).long(), 0),
    ],
)
def test_counts(function: Callable[[Tensor], Tensor], dim: int) -> None:
    assert traced_dim(function) == dim


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(1, ROWS + 1),
        lambda x: torch.arange(0, 2 * ROWS, 2),
        lambda x: torch.arange(ROWS).flip(0),
        lambda x: torch.arange(ROWS) + 1,
        lambda x: torch.arange(ROWS) * 2,
        lambda x: torch.arange(ROWS).view(2, 3),
        lambda x: torch.arange(ROWS)[:, None].expand(ROWS, ROWS).reshape(-1),
        lambda x: torch.arange(ROWS)[None, :].expand(ROWS, ROWS).reshape(-1),
        lambda x: torch.arange(ROWS)[:, None].expand(ROWS, 2).reshape(2, ROWS),
        lambda x: torch.zeros(ROWS, dtype=torch.int64),
    ],
)
def test_does_not_count(function: Callable[[Tensor], Tensor]) -> None:
    assert traced_dim(function) is None
