"""Packed sequences composed of plain operators: their lengths become guarded values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the steps that are there, time first, and how many sequences have each.

    Raises:
        RuntimeError: As torch does, for lengths that do not fall.
    """
    if not bool((lengths[1:] <= lengths[:-1]).all() & (lengths > 0).all()):
        raise RuntimeError("`lengths` must be positive and sorted in decreasing order")
    steps = x.transpose(0, 1) if batch_first else x
    there = torch.arange(steps.shape[0]).unsqueeze(1) < lengths.cpu()
    return steps[there.to(x.device)], there.sum(1)[there.any(1)]


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return padded sequences and their lengths."""
    there = torch.arange(int(batch_sizes[0])) < batch_sizes.unsqueeze(1)
    steps, rows = (each.to(data.device) for each in there.nonzero(as_tuple=True))
    size = (max(total_length, there.shape[0]), there.shape[1], *data.shape[1:])
    padded = data.new_full(size, padding).index_put((steps, rows), data)
    return padded.transpose(0, 1) if batch_first else padded, there.sum(0)


def _stacked(over_packed: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Run layers one by one: torch's decomposition of several (2.13) drops nothing between."""
    data, batch_sizes, hidden, params, has_biases, num_layers, dropout, train, both_ways = args
    width, directions = len(params) // num_layers, 2 if both_ways else 1
    finals = []
    for i in range(num_layers):
        if i and train and dropout:
            data = torch.dropout(data, dropout, True)
        rows = slice(i * directions, (i + 1) * directions)
        initial = hidden[rows] if isinstance(hidden, Tensor) else [h[rows] for h in hidden]
        own = params[i * width : (i + 1) * width]
        data, *final = over_packed(
            data, batch_sizes, initial, own, has_biases, 1, 0.0, train, both_ways
        )
        finals.append(final)
    return (data, *(torch.cat(each) for each in zip(*finals, strict=True)))


def _layer(name: str, over_packed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer's function whose packed form is composed; the other is torch's."""
    function = getattr(torch._C._VariableFunctions, name)

    def run(*args: Any) -> Any:
        is_packed = isinstance(args[1], Tensor) and not isinstance(args[3], bool)
        return _stacked(over_packed, *args) if is_packed else function(*args)

    return run


_LAYERS = {
    "lstm": decompositions.lstm_data_impl,
    "gru": decompositions.gru_impl_data,
    "rnn_tanh": decompositions.rnn_tanh_data,
    "rnn_relu": decompositions.rnn_relu_data,
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch._C._VariableFunctions._pack_padded_sequence: _pack,
    torch._C._VariableFunctions._pad_packed_sequence: _unpack,
} | {
    getattr(torch._C._VariableFunctions, name): _layer(name, over_packed)
    for name, over_packed in _LAYERS.items()
}
