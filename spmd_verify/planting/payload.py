"""What is sent instead, by kind of fault; a graph calls these as it calls an operator."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(payload: Tensor, factor: float) -> Tensor:
    """Return a payload times a factor; integers only times whole numbers."""
    if payload.is_floating_point() or payload.is_complex():
        return payload * factor
    return payload * int(factor) if factor == int(factor) else payload.clone()


def shifted(payload: Tensor) -> Tensor:
    """Return a payload moved on by one row."""
    return payload.roll(1, 0) if payload.ndim else payload.clone()


def kept_if(payload: Tensor, is_kept: bool) -> Tensor:
    """Return a payload, or zeros."""
    return payload.clone() if is_kept else torch.zeros_like(payload)
