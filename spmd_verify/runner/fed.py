"""Run one step of a cell on this rank with the reference fed in at boundaries of modules.

Design: docs/design.md 3.11. What is fed in was written for this rank by `feeding`.
"""

from __future__ import annotations

import os

from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_verify.boundaries import Boundaries
from spmd_verify.compare import compare
from spmd_verify.errors import Unsupported
from spmd_verify.reference.stepped import evaluates_after
from spmd_verify.reference.trajectory import Observation
from spmd_verify.runner.drive import Drive, anchor
from spmd_verify.runner.specs import CellReport, Feeding, encode
from spmd_verify.styles.base import mesh_coordinates
from spmd_verify.styles.eager import EagerRun

# What tells whether a step became right.
_STAGES = ("loss", "gradients")


def seen_path(folder: str, rank: int) -> str:
    """Return the file of what passed one rank's boundaries: `values|key`, `gradients|key`."""
    return os.path.join(folder, f"seen-{rank:05d}.safetensors")


def fed_path(folder: str, rank: int) -> str:
    """Return the file of what may be fed to one rank, by key; local shapes, float64."""
    return os.path.join(folder, f"fed-{rank:05d}.safetensors")


def fed_step(drive: Drive, feeding: Feeding) -> CellReport:
    """Run the style up to a step and that step with the reference fed in.

    Returns:
        Statistics of loss and gradients of that step; the fact `boundaries` has the norm of
        this rank's deviation by key, before anything was fed in there.

    Raises:
        Unsupported: `no-boundaries`, where the style trains no real module.
    """
    run = drive.style.build(drive.case, drive.context)
    if not isinstance(run, EagerRun):
        raise Unsupported(
            f"Nothing can be fed in: {drive.style.name} trains no real module whose boundaries "
            f"could be hooked. Use an eager style",
            slug="no-boundaries",
        )
    rank = mesh_coordinates(drive.context.axes).index(drive.context.coordinates[0])
    known: dict[str, Tensor] = {}
    if os.path.exists(fed_path(feeding.folder, rank)):
        known = load_file(fed_path(feeding.folder, rank))
    fed = {key: known[key] for key in feeding.fed if key in known}
    is_forward = feeding.direction == "values"
    _advance(drive, run, feeding)
    with Boundaries(
        run.modules(),
        fed_values=fed if is_forward else None,
        fed_gradients=None if is_forward else fed,
    ) as seen:
        observation = _step(drive, run, feeding.step)
    if feeding.is_watching:
        save_file(_storable(seen), seen_path(feeding.folder, rank))
    shown = {stage: observation[stage] for stage in _STAGES if stage in observation}
    statistics = compare(
        drive.store, shown, run=feeding.run, step=feeding.step, mesh_shape=drive.mesh_shape
    )
    passed = seen.values if is_forward else seen.gradients
    off = {
        key: float((passed[key].double() - value.double()).norm())
        for key, value in known.items()
        if key in passed and passed[key].shape == value.shape
    }
    return CellReport(
        statistics=encode(statistics),
        fallbacks={},
        collectives={},
        captures=0,
        notes=[],
        facts={"boundaries": off, "is_anchored": feeding.run == "anchored"},
    )


def _advance(drive: Drive, run: EagerRun, feeding: Feeding) -> None:
    """Bring a run to the state before the step."""
    if feeding.step and feeding.run == "anchored":
        _step(drive, run, 0)
        anchor(run, drive.store, feeding.step, drive.mesh_shape)
        return
    for index in range(feeding.step):
        _step(drive, run, index)
        if evaluates_after(drive.case, index):
            drive.case.seed_step(drive.case.steps)
            run.evaluate(drive.case.batch(0))


def _step(drive: Drive, run: EagerRun, index: int) -> Observation:
    """Run one step from its seed."""
    drive.note(f"step {index} with the reference fed in")
    batch = drive.case.batch(index)
    drive.case.seed_step(index)
    return run.step(index, batch)


def _storable(seen: Boundaries) -> dict[str, Tensor]:
    """Return what passed, as tensors of their own."""
    kinds = {"values": seen.values, "gradients": seen.gradients}
    return {
        f"{kind}|{key}": value.contiguous()
        for kind, found in kinds.items()
        for key, value in found.items()
    }
