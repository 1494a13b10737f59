"""What can be said of a difference where nobody measured the noise, or too few runs did.

Without `--exact` and `--noise` the floor of a tensor is `2 u ||x||`. A difference beyond it is
rounding or a fault; it is called a mismatch where it is larger than any floor that decides
anything, or where a cause explains it too well for chance, and else `undetermined`. With noise
runs only values that cancel to zero stay in doubt: every draw of their noise may be 0. Measured
(MLP, transformer, conv net; AdamW, SGD; 4 seeds; 2 clean splits each): 0 of 48 clean candidates
failed without noise runs, and 24 of 24 factors of 1.0001 were named. A transformer in float64
failed 4 of 12 times with four noise runs before this was asked of those too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from spmd_verify.dumps.dump import Dump
from spmd_verify.dumps.format import DumpError, Key
from spmd_verify.noise.floors import NEGLIGIBLE_SHARE, rms
from spmd_verify.norms import as_real
from spmd_verify.record import Row
from spmd_verify.stored.store import Store
from spmd_verify.verdict import Verdict, limit, unit_roundoff, usable_floor

REASON: Final = (
    "larger than one rounding, smaller than what no rounding explains; give --exact or --noise"
)
ZERO_REASON: Final = (
    "its gradient is zero beside the others', so that rounding may decide it; give --noise"
)
# Fewer noise runs than this are said in the report. Source: verdicts.md part 3.
FEWEST_RUNS: Final = 4
# A factor this close to 1, in floors, may be the rounding of one number that a whole tensor was
# multiplied by, such as a clip factor: those are sums themselves. Chosen: 16 x 2 u = 2e-6.
CLEAR_FACTOR: Final = 16.0
# A random difference of n elements leaves a share s of itself beside a factor with a chance of
# about s ** (n - 1). Chosen: one false alarm in a million tensors.
CHANCE: Final = 1e-6


@dataclass
class Noiseless:
    """Settles the rows of one comparison.

    Attributes:
        store: The reference.
        candidate: The dump that is judged.
        is_measured: Whether some run measured the floors; else they are `2 u ||x||`.
        num_runs: How many noise runs there are.
    """

    store: Store
    candidate: Dump
    is_measured: bool
    num_runs: int
    _siblings: dict[tuple[int, str, str], float] = field(default_factory=dict)
    _keys: dict[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Remember under which text each tensor of the candidate lies."""
        self._keys = {Key.of(text): text for text in list(self.candidate.keys())}

    def settle(self, rows: list[Row]) -> None:
        """Turn mismatches that rounding might explain into undetermined rows, in place."""
        for row in rows:
            if row.verdict != Verdict.MISMATCH or not self._may_be_rounding(row):
                continue
            reason = REASON
            if self.is_measured or self._relative(row) > usable_floor(row.dtype):
                if not (self._is_negligible(row) or self._is_zero_gradient(row)):
                    continue
                reason = ZERO_REASON
            row.verdict, row.cause = Verdict.UNDETERMINED, None
            row.unknown["reason"] = reason

    def _may_be_rounding(self, row: Row) -> bool:
        """Say whether a row has a floor, was measured, and no cause is clear."""
        entry = self.store.entry(row.step, row.stage, row.name)
        if entry is None or not entry.floors or row.error is None or not math.isfinite(row.error):
            return False
        if "problem" in row.unknown or (row.unknown.get("copies_differ") and row.stage != "loss"):
            return False  # copies are equal bit for bit, whatever rounding does
        cause = row.cause
        if cause is None or cause.kind == "unexplained":
            return True
        floors = abs((cause.factor or 0.0) - 1.0) / (2.0 * unit_roundoff(row.dtype))
        share = min(limit(row.dtype, "tensor") / max(floors, 1.0), 1.0)
        is_chance = share ** (math.prod(row.shape) - 1) > CHANCE
        return floors < CLEAR_FACTOR or is_chance

    def _share(self, dtype: str) -> float:
        """Return the share of its siblings that a value or difference is nothing beside."""
        is_sure = self.num_runs >= FEWEST_RUNS
        return CLEAR_FACTOR * 2.0 * unit_roundoff(dtype) if is_sure else NEGLIGIBLE_SHARE

    def _relative(self, row: Row) -> float:
        """Return a row's error as a share of the value: its floor is `2 u` of that."""
        return (row.ratio or 0.0) * 2.0 * unit_roundoff(row.dtype)

    def _is_negligible(self, row: Row) -> bool:
        """Say whether an error is nothing beside the values used together with this one."""
        if row.stage not in ("gradients", "optimizer_state"):
            return False
        family = row.name.rsplit(".", 1)[-1] if row.stage == "optimizer_state" else ""
        key = (row.step, row.stage, family)
        if key not in self._siblings:
            names = self.store.names(row.step, row.stage)
            members = [name for name in names if name.rsplit(".", 1)[-1] == family or not family]
            values = [self.store.expected(row.step, row.stage, name) for name in members]
            self._siblings[key] = rms(value for value in values if value.is_floating_point())
        around = self._siblings[key] * math.sqrt(math.prod(row.shape))
        return (row.error or 0.0) <= self._share(row.dtype) * around

    def _is_zero_gradient(self, row: Row) -> bool:
        """Say whether a parameter or its state differs only where its gradient is zero.

        Zero is what is nothing beside the other gradients of some step until now: an adaptive
        optimizer makes a step of full length of its rounding.
        """
        if row.stage not in ("parameters", "optimizer_state"):
            return False
        name = row.name if row.stage == "parameters" else row.name.rsplit(".", 1)[0]
        expected = self.store.expected(row.step, row.stage, row.name)
        try:
            text = self._keys[Key("free", row.step, row.stage, row.name)]
            actual = self.candidate.global_tensor(text)
        except (KeyError, DumpError):
            return False
        quiet = self._quiet(row, name, expected.shape)
        if quiet is None or not bool(quiet.any()):
            return False
        error = (as_real(actual).double() - as_real(expected).double())[~quiet].norm()
        scale = as_real(expected).double()[~quiet].norm()
        if self.num_runs >= FEWEST_RUNS:
            return float(error) <= limit(row.dtype, "tensor") * (row.noise or 0.0)
        return float(error) <= usable_floor(row.dtype) * float(scale)

    def _quiet(self, row: Row, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return the elements whose gradient was zero in some step until that of a row."""
        quiet, share = None, self._share(row.dtype)
        for index in range(row.step + 1):
            if self.store.entry(index, "gradients", name) is None:
                continue
            gradient = self.store.expected(index, "gradients", name)
            if gradient.shape != torch.Size(shape) or gradient.is_complex():
                return None
            typical = rms(
                self.store.expected(index, "gradients", each)
                for each in self.store.names(index, "gradients")
            )
            small = gradient.double().abs() <= share * typical
            quiet = small if quiet is None else quiet | small
        return quiet
