"""Inputs of a step that share memory: the graph would treat them as separate values."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from spmd.errors import CaptureError
from spmd.program import Signature


def refuse_shared_memory(signature: Signature, values: list[Any]) -> None:
    """Raise if the step writes to one of two inputs that overlap in memory.

    Args:
        signature: Of the functional graph; its outputs name what is written.
        values: The real values of its inputs, in order.

    Raises:
        CaptureError: `shared-memory`, naming both.
    """
    written = {(s.kind, s.name) for s in signature.outputs if s.kind != "result"}
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for position, value in enumerate(values):
        span = _span(value) if isinstance(value, Tensor) else None
        if span is not None:
            spans.setdefault(span[0], []).append((*span[1:], position))
    for together in spans.values():
        together.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(together):
            specs = [signature.inputs[first], signature.inputs[second]]
            if any(s.kind == "captured" for s in specs):
                # A derived attribute (spectral_norm's weight) is replaced, not written into.
                continue
            if start < end and any((s.kind, s.name) in written for s in specs):
                names = " and ".join(f"{s.kind} {s.name!r}" for s in specs)
                raise CaptureError(
                    f"{names} share memory and the step writes to it, so that one changes with "
                    "the other. Tie parameters by assigning the same Parameter, or clone one of "
                    "them.",
                    None,
                    "shared-memory",
                )


def _span(value: Tensor) -> tuple[int, int, int] | None:
    """Return (storage, first byte, byte behind the last) of a strided tensor with elements."""
    if not value.numel() or value.layout != torch.strided or value.is_meta:
        return None
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # wrappers (DTensor) have no memory of their own
    last = sum((int(n) - 1) * int(s) for n, s in zip(value.shape, value.stride(), strict=True))
    size = value.element_size()
    start = int(value.storage_offset()) * size
    return value.untyped_storage().data_ptr(), start, start + (last + 1) * size
