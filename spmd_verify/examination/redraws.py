"""More noise runs for rows that fail alone and by little.

A row of which one product makes all of the noise has one degree of freedom: half a dozen draws can
all be small, and a cell has thousands of rows. Where nothing else of a step differs, as many more
draws are made as leave no room for chance. Only failing cells pay, and no floor is loosened: a
fault stays as far above it as it is above the true noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.norms import as_real
from spmd_verify.record import Row
from spmd_verify.verdict import Verdict, limit

# A normal draw above c = 4 times the largest of n others has probability 4e-3 for n = 4 and
# 1e-8 for n = 28 (integrated over the largest, for one degree of freedom).
DRAWS: Final = 24
# Chance makes neither more rows fail at once nor larger ratios: of 4 draws the largest is below
# an eighth of the deviation in 1 of 10,000 rows.
MOST_ROWS: Final = 8
LARGEST_RATIO: Final = 40.0
# Apart from the seeds of the reference's own runs.
_FIRST_SEED: Final = 7_000_003


def redraw(exhibit: Exhibit, rows: Sequence[Row]) -> None:
    """Settle rows that are within the noise of more draws, in place.

    Args:
        exhibit: The cell at its first differing step.
        rows: All rows of the cell.
    """
    wrong = [r for r in rows if r.verdict == Verdict.MISMATCH and r.step == exhibit.step]
    doubtful = [row for row in wrong if _is_doubtful(row)]
    if not doubtful or len(doubtful) < len(wrong) or len(wrong) > MOST_ROWS:
        return
    largest = dict.fromkeys(range(len(doubtful)), 0.0)
    for seed in range(_FIRST_SEED, _FIRST_SEED + DRAWS):
        record = exhibit.runs.record(exhibit.batch, in_float64=False, rounding=seed)
        if record is None:
            return
        for i, row in enumerate(doubtful):
            value = record.get(row.stage, {}).get(row.name)
            if value is not None:
                largest[i] = max(largest[i], _error(exhibit, row, value))
    for i, row in enumerate(doubtful):
        floor = max(row.noise or 0.0, largest[i])
        if row.error is not None and row.error <= limit(row.dtype, "row") * floor:
            row.verdict, row.cause = str(Verdict.ROUNDING), None
            row.noise, row.ratio = floor, row.error / floor
            row.unknown["explained"] = f"within the noise of {DRAWS} more runs of one device"


def _is_doubtful(row: Row) -> bool:
    """Say whether only one dim-0 row of a tensor failed, and by little."""
    return "row" in row.unknown and row.ratio is not None and row.ratio <= LARGEST_RATIO


def _error(exhibit: Exhibit, row: Row, value: Tensor) -> float:
    """Return what one draw's row is off the reference, as a norm."""
    at = int(row.unknown["row"])
    own = as_real(value).to(torch.float64)
    return float((own[at] - exhibit.reference(row)[at]).norm())
