"""An SPMD graph engine for PyTorch: capture a training step once, run it on every rank."""

from __future__ import annotations

from spmd.compile import compile
from spmd.layout import Layout, Partial, Replicate, Shard
from spmd.overrides import Override
from spmd.parallel_mode import (
    DataParallel,
    DataParallelStyle,
    DTensorExpandMode,
    HybridShard,
    ParallelMode,
    SequenceParallel,
    TensorParallel,
)
from spmd.placed import Placed

__all__ = [
    "DTensorExpandMode",
    "DataParallel",
    "DataParallelStyle",
    "HybridShard",
    "Layout",
    "Override",
    "ParallelMode",
    "Partial",
    "Placed",
    "Replicate",
    "SequenceParallel",
    "Shard",
    "TensorParallel",
    "compile",
]
