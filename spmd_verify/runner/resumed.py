"""Resume one style's run in one process: save before the last step, load, run the last step.

What is saved is the reference's state, written into the run as for an anchored step: so the state
after loading has to be the reference's bit for bit, and the last step has the anchored floors,
which no earlier step has widened. The fresh build comes from another seed: what is not loaded
cannot pass for what was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.record import Row
from spmd_verify.runner.drive import Drive, anchor
from spmd_verify.runner.specs import CellReport, Resume, encode
from spmd_verify.styles import saving
from spmd_verify.styles.base import StyleRun
from spmd_verify.styles.eager import EagerRun
from spmd_verify.verdict import CARRIED_STAGES, Verdict

# Far from the seeds of steps, which count up from the case's, and from those of planted faults.
_OTHER_SEED = 2_000_003


def resumed(drive: Drive, resume: Resume) -> CellReport:
    """Resume a run and compare. Collective.

    Returns:
        Statistics of the state after loading and of the last step. The fact `ways` says how the
        style can be saved.

    Raises:
        Unsupported: `cannot-save`; the style does not take the case.
    """
    case, last, ways = drive.case, drive.case.steps - 1, [resume.way]
    load: Callable[[StyleRun], None]
    if resume.is_saving:
        run = drive.style.build(case, drive.context)
        for index in range(last):
            _step(drive, run, index)
        unknown = anchor(run, drive.store, last, drive.mesh_shape)
        if drive.context.any_rank(bool(unknown)):
            shown = ", ".join(unknown[:3]) or "a tensor of another rank"
            raise Unsupported(
                f"Cannot check resuming: nobody says which part of {shown} a rank holds. Say it in "
                f"layout_{drive.style.name}()",
                slug="cannot-save",
            )
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
    drive.compare("anchored", last, _step(drive, fresh, last))
    drive.compare("free", last, fresh.state())
    drive.compare_carried(fresh, last)
    return CellReport(
        statistics=encode(drive.statistics),
        fallbacks={},
        collectives={},
        captures=0,
        notes=[],
        facts={"ways": ways, "is_anchored": True},
    )


def strict_state(rows: list[Row]) -> None:
    """Hold the state after loading to the reference's bits, in place.

    Only that of the step before the last was compared of the free run and of no other stage.
    """
    shown = [row for row in rows if row.step < rows[-1].step and row.stage in CARRIED_STAGES]
    for row in shown:
        if row.verdict in (Verdict.ROUNDING, Verdict.UNDETERMINED) and row.error is not None:
            row.verdict = str(Verdict.MISMATCH)


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
