"""Packed sequences: their lengths are values a captured step is guarded by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from constructs import sgd, train
from lockstep_check import check
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from spmd import lockstep
from spmd.parallel_mode import DataParallel


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Packed(nn.Module):
    """A recurrent layer over packed sequences, padded again."""

    def __init__(self, layer: type[nn.Module], is_sorted: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer, self.is_sorted = layer(3, 4, **options), is_sorted
        self.batch_first = options.get("batch_first", False)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        first, total = self.batch_first, x.shape[1 if self.batch_first else 0]
        packed = pack_padded_sequence(x, lengths, first, enforce_sorted=self.is_sorted)
        y, last = self.layer(packed)
        padded, found = pad_packed_sequence(y, first, -1.0, total_length=total)
        return padded, found, last


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.randn(len(lengths), 6, 3), torch.tensor(lengths)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}),
        (nn.LSTM, {"proj_size": 2, "bias": False}),
        (nn.GRU, {"num_layers": 3, "dropout": 0.3}),
        (nn.RNN, {"bidirectional": True, "nonlinearity": "relu"}),
        (nn.RNN, {"is_sorted": True}),
    ],
)
def test_packed_sequences_equal_one_device(layer: type[nn.Module], options: Any) -> None:
    lengths = (5, 5, 4, 2, 2, 1, 1) if "is_sorted" in options else (2, 5, 1, 4, 5, 3, 1)
    torch.manual_seed(1)
    check(lambda: Packed(layer, batch_first=True, **options), sgd, train, batch(*lengths))


def test_other_lengths_are_captured_anew() -> None:
    pair = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Packed(nn.LSTM, batch_first=True)
        pair.append((model, sgd(model.parameters())))
    compiled = lockstep.compile(parallel_mode=DataParallel("fully_shard"), mesh={"dp": 3})(train)
    for lengths in [(3, 1, 4)] * 4 + [(3, 2, 3), (6, 1, 1), (3, 1, 4)]:
        given = batch(*lengths)
        ours, theirs = compiled(*pair[0], *given), train(*pair[1], *given)
        torch.testing.assert_close(ours, theirs)
    for p, q in zip(pair[0][0].parameters(), pair[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_lengths_that_do_not_fall_are_refused_as_torch_does() -> None:
    model = Packed(nn.GRU, is_sorted=True, batch_first=True)
    compiled = lockstep.compile(parallel_mode=DataParallel("replicate"), mesh={"dp": 2})(train)
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        compiled(model, sgd(model.parameters()), *batch(1, 3))
