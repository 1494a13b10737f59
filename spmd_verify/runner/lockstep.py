"""The runner `lockstep`: one process walks the graphs of all ranks together.

Only the engine's styles have such graphs. There are no ranks to lose, any world size fits,
and what one cell captured serves the next, because both run in the same worker. Torch-free.
"""

from __future__ import annotations

import time

from spmd_verify.runner.failures import Failure
from spmd_verify.runner.pool import Pool
from spmd_verify.runner.specs import CELL_JOB, CellEvidence, CellSpec, OnNote, encode


class LockstepRunner:
    """Keeps one worker; a cell that breaks it costs that cell, like a rank does.

    Attributes:
        name: First part of the log file's name, before the rank.
    """

    def __init__(self, *, work_dir: str, log_dir: str, name: str = "lockstep") -> None:
        """Describe the worker; it starts with the first cell.

        Args:
            work_dir: Existing folder for the worker's files.
            log_dir: Existing folder for its log.
            name: First part of the log file's name.
        """
        self.name = name
        self._pool = Pool(1, work_dir=work_dir, log_dir=log_dir, name=name)

    def prepare(self, spec: CellSpec) -> None:  # noqa: ARG002 - one worker serves all cells
        """Start the worker, so that it is there when the first cell comes."""
        self._pool.start()

    def run_cell(self, spec: CellSpec, on_note: OnNote | None = None) -> CellEvidence | Failure:
        """Run one cell with all its ranks in the worker."""
        started = time.monotonic()
        answer = self._pool.run(
            CELL_JOB, encode(spec), timeout_seconds=spec.timeout_seconds, on_note=on_note
        )
        if isinstance(answer, Failure):
            return answer
        return CellEvidence(answer, time.monotonic() - started)

    def stop(self) -> None:
        """End the worker."""
        self._pool.stop()
