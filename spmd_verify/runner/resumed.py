"""Resume one style's run in one process: save before the last step, load, run the last step.

The fresh build comes from another seed, so that what is not loaded cannot pass for what was
saved. What is compared: the state after loading with the reference's before the last step, then
that step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from spmd_verify.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.runner.drive import Drive
from spmd_verify.runner.specs import CellReport, Resume, encode
from spmd_verify.styles import saving
from spmd_verify.styles.base import StyleRun
from spmd_verify.styles.eager import EagerRun

# Far from the seeds of steps, which count up from the case's, and from those of planted faults.
_OTHER_SEED = 2_000_003


def resumed(drive: Drive, resume: Resume) -> CellReport:
    """Resume a run and compare; the fact `ways` says how it can be saved. Collective.

    Raises:
        Unsupported: `cannot-save`; the style does not take the case.
    """
    case, last, ways = drive.case, drive.case.steps - 1, [resume.way]
    load: Callable[[StyleRun], None]
    if resume.is_saving:
        run = drive.style.build(case, drive.context)
        for index in range(last):
            _step(drive, run, index)
        ways = saving.ways(run)
        has_parts = drive.context.any_rank(ways == [saving.STATE_DICT])
        ways = ways[:1] if has_parts else ways
        if saving.CHECKPOINT in ways:
            assert isinstance(run, EagerRun), "only those have checkpoints"
            saving.save_checkpoint(run, resume.folder)
        load = _loading(saving.save(run))
    else:
        load = _reading(resume.folder)
    fresh = drive.style.build(_reseeded(case), drive.context)
    if not isinstance(fresh, EagerRun):
        _step(drive, fresh, 0)  # the engine's state is there after a step only
    load(fresh)
    drive.compare("free", last - 1, fresh.state())
    drive.compare_hyper_parameters(fresh, last)
    drive.compare("free", last, _step(drive, fresh, last))
    drive.compare("free", last, fresh.state())
    return CellReport(
        statistics=encode(drive.statistics),
        fallbacks={},
        collectives={},
        captures=0,
        notes=[],
        facts={"ways": ways, "is_anchored": False},
    )


def _loading(saved: Any) -> Callable[[StyleRun], None]:
    """Return what loads a state from memory."""
    return lambda run: saving.load(run, saved)


def _reading(folder: str) -> Callable[[StyleRun], None]:
    """Return what loads a checkpoint."""

    def load(run: StyleRun) -> None:
        if not isinstance(run, EagerRun):
            raise Unsupported(
                "Cannot resume by checkpoint: the style has no module that could be saved. Use "
                "an eager style",
                slug="cannot-save",
            )
        saving.load_checkpoint(run, folder)

    return load


def _reseeded(case: LoadedCase) -> LoadedCase:
    """Return the case with other initial values and the same batches."""
    other = copy.copy(case)
    other.seed = case.seed + _OTHER_SEED
    return other


def _step(drive: Drive, run: StyleRun, index: int) -> Any:
    """Run one step from the case's own seed."""
    drive.note(f"step {index} of the resumed run")
    batch = drive.case.batch(index)
    drive.case.seed_step(index)
    return run.step(index, batch)
