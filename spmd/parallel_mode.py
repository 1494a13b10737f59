"""How a captured step is partitioned: the modes, under the names of the retired prototype."""

from __future__ import annotations

from spmd.data_parallel import DataParallel, DataParallelStyle
from spmd.dtensor_expand import DTensorExpandMode
from spmd.hybrid_shard import HybridShard
from spmd.mode import ParallelMode
from spmd.sequence_parallel import SequenceParallel
from spmd.tensor_parallel import TensorParallel

__all__ = [
    "DTensorExpandMode",
    "DataParallel",
    "DataParallelStyle",
    "HybridShard",
    "ParallelMode",
    "SequenceParallel",
    "TensorParallel",
]
