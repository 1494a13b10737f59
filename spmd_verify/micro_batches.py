"""How a pipeline cuts a rank's part of the batch: equal consecutive micro-batches."""

from __future__ import annotations

from typing import Any

from spmd_verify.cases.case import LoadedCase
from spmd_verify.noise.members import split_batch


def micro_batch_count(size: int, stages: int) -> int:
    """Return into how many equal micro-batches a part of `size` samples is cut.

    The smallest divisor of the size that keeps every stage busy; all samples one by one where
    there are fewer of them than stages.
    """
    return next((n for n in range(stages, size + 1) if size % n == 0), size)


def micro_batches(case: LoadedCase, part: Any, count: int) -> list[Any]:
    """Return the micro-batches of a rank's part of the batch, in the order they run.

    Args:
        case: Says which dim of each leaf has the samples.
        part: A batch whose samples `count` divides.
        count: How many.
    """
    return split_batch(case, part, count)
