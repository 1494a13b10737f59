"""Keep a TorchFunctionMode on while backward runs.

A mode is off while it handles a call, and backward is a call: what backward computes -
recomputed forwards, custom autograd functions - would escape it. The only module that uses
`torch.autograd.graph._engine_run_backward` and `torch.autograd._make_grads` (torch 2.13,
torch/autograd/__init__.py): every public way in is a call that the mode would handle again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

# Called with the tensor whose backward is about to run, where a mode runs it.
_watchers: list[Callable[[Tensor], None]] = []


@contextmanager
def watching(watcher: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell a function of every backward that a mode runs, before it runs."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def backward_inside(
    mode: TorchFunctionMode, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Do what `Tensor.backward(*args, **kwargs)` does, under the mode."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    create_graph = bool(given.get("create_graph", False))
    retain_graph = given.get("retain_graph")
    inputs = given.get("inputs") or ()
    for watcher in _watchers:
        watcher(args[0])
    with mode:
        tensors = (args[0],)
        gradients = torch.autograd._make_grads(tensors, (given.get("gradient"),), False)
        _engine_run_backward(
            tensors,
            gradients,
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            (inputs,) if isinstance(inputs, Tensor) else tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )
