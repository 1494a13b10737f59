"""The runner `processes`: real ranks in real processes, one process group per cell.

gloo on CPU; nccl where the ranks' tensors are on GPUs, one GPU per rank. Torch-free.
"""

from __future__ import annotations

import time

from spmd_verify.errors import UsageError
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.pool import Pool
from spmd_verify.runner.specs import CAPTURE, CELL_JOB, CellEvidence, CellSpec, OnNote, encode
from spmd_verify.style_ids import ENGINE

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class ProcessRunner:
    """Keeps one pool of ranks and uses it for every cell of the same world size.

    Attributes:
        name: First part of the log files' names, before the rank.
    """

    def __init__(
        self, *, work_dir: str, log_dir: str, device_type: str = "cpu", name: str = "rank"
    ) -> None:
        """Describe the ranks; they start with the first cell.

        Args:
            work_dir: Existing folder for the rendezvous.
            log_dir: Existing folder for the rank logs.
            device_type: A key of `BACKENDS`.
            name: First part of the log files' names.

        Raises:
            UsageError: `unknown-device`.
        """
        if device_type not in BACKENDS:
            raise UsageError(
                f"Unknown device: --device {device_type!r}. Expected one of {', '.join(BACKENDS)}",
                slug="unknown-device",
            )
        self._work_dir = work_dir
        self._log_dir = log_dir
        self._device_type = device_type
        self.name = name
        self._pool: Pool | None = None

    def prepare(self, spec: CellSpec) -> None:
        """Start the ranks of the next cell, so that they are there when it comes."""
        self._pool_of(spec).start()

    def run_cell(self, spec: CellSpec, on_note: OnNote | None = None) -> CellEvidence | Failure:
        """Run one cell on one process per rank."""
        pool = self._pool_of(spec)
        started = time.monotonic()
        answer = pool.run(
            CELL_JOB, encode(spec), timeout_seconds=spec.timeout_seconds, on_note=on_note
        )
        if isinstance(answer, Failure):
            return answer
        return CellEvidence(answer, time.monotonic() - started, pool.start_seconds)

    def stop(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def _pool_of(self, spec: CellSpec) -> Pool:
        """Return the pool of a cell's world size; another one is replaced.

        Ranks that start for a cell of the engine begin with what it captures for its case.
        """
        if self._pool is None or self._pool.num_ranks != spec.num_ranks:
            self.stop()
            self._pool = Pool(
                spec.num_ranks,
                work_dir=self._work_dir,
                log_dir=self._log_dir,
                backend=BACKENDS[self._device_type],
                device_type=self._device_type,
                name=self.name,
            )
        captures = self._device_type == "cpu" and spec.style in ENGINE
        self._pool.capture = (CAPTURE, encode(spec.case)) if captures else None
        return self._pool
