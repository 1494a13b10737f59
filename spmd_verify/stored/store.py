"""The reference on disk: one safetensors file per step and an index; ranks read slices of it.

Written once by the controller, memory-mapped by every rank. Files are written under another
name and renamed, so that a reader never sees half a file. No pickle. safetensors refuses
complex128, so complex tensors are stored as [..., 2] real.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from spmd_verify.errors import InternalError
from spmd_verify.layouts import Region, take_region
from spmd_verify.noise.floors import Floor, Key
from spmd_verify.noise.runs import Noise, exact_steps
from spmd_verify.norms import as_real, is_rounding
from spmd_verify.record import ExactInfo
from spmd_verify.reference.single import Reference
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.stored.mapped import MappedTensors
from spmd_verify.verdict import ANCHORED_STAGES, CARRIED_STAGES, STAGES

INDEX: Final = "index.json"
RUNS: Final = ("free", "anchored")


class FloorInfo(msgspec.Struct, kw_only=True):
    """The scalars of a `floors.Floor`."""

    noise: float
    scale: float
    undetermined_elements: int = 0
    reason: str | None = None


class Entry(msgspec.Struct, kw_only=True):
    """One tensor of the reference.

    Attributes:
        step: From 0.
        stage: See `verdict.STAGES`.
        name: First name.
        shape: Global sizes.
        dtype: Without `torch.`.
        aliases: Other names of the same tensor.
        has_signal: False for an all-zero gradient, a parameter that did not move in this
            step or before, a buffer that was never written.
        value: The number itself, for tensors of one element.
        floors: By run; empty where values are compared bit by bit.
    """

    step: int
    stage: str
    name: str
    shape: list[int]
    dtype: str
    aliases: list[str] = []
    has_signal: bool = True
    value: float | None = None
    floors: dict[str, FloorInfo] = {}

    @property
    def is_anchored_too(self) -> bool:
        """Say whether it is carried over and only the anchored run has a usable floor for it."""
        return "anchored" in self.floors and self.stage in CARRIED_STAGES


class Index(msgspec.Struct, kw_only=True):
    """What the store holds, in the reference's order."""

    steps: int
    dtype: str
    entries: list[Entry]
    hyper_parameters: list[dict[str, float]]
    trainable: list[str]
    groups: list[list[str]] = []
    runs: list[str] = []
    dropped: list[str] = []
    islands: list[str] = []
    notes: list[str] = []
    absent: str | None = None
    exact: ExactInfo | None = None


def write_store(
    directory: Path,
    reference: Reference,
    noise: Noise,
    *,
    dtype: str,
    trainable: list[str],
    exact: ExactInfo | None = None,
) -> None:
    """Write a reference and its floors.

    Args:
        directory: Made if it does not exist.
        reference: What one device computes.
        noise: Its floors.
        dtype: The case's dtype, without `torch.`.
        trainable: Parameters that require grad.
        exact: What exact mode proved.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[Entry] = []
    for step, record in enumerate(reference.run.steps):
        tensors: dict[str, Tensor] = {}
        for stage in STAGES:
            for name, value in record.get(stage, {}).items():
                entry = _entry(reference, noise, step, stage, name, trainable)
                entries.append(entry)
                tensors[_key("expected", stage, name)] = value
                _add_exact(tensors, reference, noise, step, stage, name)
                for run in entry.floors:
                    _add_rows(tensors, run, stage, name, noise.floors[run][step, stage, name])
        path = directory / _file(step)
        save_file(_storable(tensors), f"{path}.part")
        os.replace(f"{path}.part", path)
    index = Index(
        steps=len(reference.run.steps),
        dtype=dtype,
        entries=entries,
        hyper_parameters=reference.run.hyper_parameters,
        trainable=trainable,
        groups=reference.run.groups,
        runs=list(noise.runs),
        dropped=list(noise.dropped),
        islands=list(noise.islands),
        notes=list(reference.run.notes),
        absent=reference.absent,
        exact=exact,
    )
    path = directory / INDEX
    Path(f"{path}.part").write_bytes(msgspec.json.encode(index))
    os.replace(f"{path}.part", path)


class Store:
    """Reader of a store; opens each step's file once and keeps it mapped."""

    def __init__(self, directory: str | Path) -> None:
        """Read the index.

        Raises:
            InternalError: `store`, if there is none.
        """
        self.directory = Path(directory)
        path = self.directory / INDEX
        if not path.exists():
            raise InternalError(
                f"There is no reference at {self.directory}. Got no {INDEX}. It is written "
                f"before any rank starts: please report this",
                slug="store",
            )
        self.index = msgspec.json.decode(path.read_bytes(), type=Index)
        self._files: dict[int, MappedTensors] = {}
        self._entries = {(e.step, e.stage, e.name): e for e in self.index.entries}
        self._names: dict[tuple[int, str], list[str]] = {}
        for step, stage, name in self._entries:
            self._names.setdefault((step, stage), []).append(name)

    def entry(self, step: int, stage: str, name: str) -> Entry | None:
        """Return what the reference has under this key."""
        return self._entries.get((step, stage, name))

    def draw(self, step: int) -> int:
        """Return which draw of an exact case's step was taken; see `ExactInfo.draws`."""
        return self.index.exact.draws[step] if self.index.exact is not None else 0

    def names(self, step: int, stage: str) -> list[str]:
        """Return the names of a stage in the reference's order."""
        return list(self._names.get((step, stage), ()))

    def expected(self, step: int, stage: str, name: str, part: Region | None = None) -> Tensor:
        """Return the reference's tensor in its own dtype, or the part of it in a region."""
        entry = self._entries[step, stage, name]
        value = self._read(step, _key("expected", stage, name), part, entry)
        return _complex(value) if entry.dtype.startswith("complex") else value

    def exact(
        self, run: str, step: int, stage: str, name: str, part: Region | None = None
    ) -> Tensor:
        """Return the float64 reference of a run, or the part of it in a region.

        Falls back to what it equals: the free one at step 0 and for a run that has none of
        its own, the reference's own tensor where float64 is absent or the same.
        """
        entry = self._entries[step, stage, name]
        file = self._file(step)
        for source in (f"{run}64", "free64"):
            key = _key(source, stage, name)
            if key in file:
                value = self._read(step, key, part, entry)
                return _complex(value) if entry.dtype.startswith("complex") else value
        return self.expected(step, stage, name, part)

    def rows(self, what: str, run: str, step: int, stage: str, name: str) -> Tensor | None:
        """Return per-row numbers of a floor: `noise`, `scale` or `undetermined`; None if absent."""
        file, key = self._file(step), _key(f"{run}.{what}", stage, name)
        return file.tensor(key) if key in file else None

    def state(self, step: int) -> StepRecord:
        """Return parameters, buffers and optimizer state after a step: the next one's anchor."""
        return {
            stage: {name: self.expected(step, stage, name) for name in self.names(step, stage)}
            for stage in ("parameters", "buffers", "optimizer_state")
        }

    def _file(self, step: int) -> MappedTensors:
        """Return a step's file, mapped once."""
        if step not in self._files:
            self._files[step] = MappedTensors(self.directory / _file(step))
        return self._files[step]

    def _read(self, step: int, key: str, part: Region | None, entry: Entry) -> Tensor:
        """Return a tensor, or the part of it that a region owns."""
        value = self._file(step).tensor(key)
        if part is None or part.is_whole(entry.shape):
            return value
        # Contiguous, as sums depend on the order of the elements.
        return take_region(value, part).contiguous()


def _complex(pairs: Tensor) -> Tensor:
    """Return pairs of real numbers as complex ones, in memory of their own.

    A file puts them at multiples of 8 bytes; torch's kernels for complex128 take 16 for granted
    and the process dies of a misaligned access.
    """
    return torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format))


def _entry(
    reference: Reference, noise: Noise, step: int, stage: str, name: str, trainable: list[str]
) -> Entry:
    """Describe one tensor of the reference."""
    value = reference.run.steps[step][stage][name]
    floors = {
        run: FloorInfo(
            noise=floor.noise,
            scale=floor.scale,
            undetermined_elements=floor.undetermined_elements,
            reason=floor.reason,
        )
        for run in RUNS
        if (floor := noise.floors[run].get((step, stage, name))) is not None
        and (run == "free" or _is_anchored(noise, (step, stage, name), value.numel()))
    }
    return Entry(
        step=step,
        stage=stage,
        name=name,
        shape=list(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        aliases=list(reference.run.aliases.get(name, ())),
        has_signal=_has_signal(reference, step, stage, name, trainable),
        value=float(value) if value.numel() == 1 and not value.is_complex() else None,
        floors=floors,
    )


def _is_anchored(noise: Noise, key: Key, count: int) -> bool:
    """Say whether the anchored run is compared in a tensor; see `verdict.CARRIED_STAGES`."""
    step, stage, _ = key
    if step == 0 or stage not in CARRIED_STAGES:
        return step > 0 and stage in ANCHORED_STAGES
    free, anchored = (noise.floors[run].get(key) for run in RUNS)
    has_none = free is not None and not free.decides(count)
    return has_none and anchored is not None and anchored.decides(count)


def _has_signal(
    reference: Reference, step: int, stage: str, name: str, trainable: list[str]
) -> bool:
    """Say whether the reference exercised a tensor at all; see `Entry.has_signal`.

    A frozen parameter that stays where it is counts as exercised: not moving is right.
    """
    value = reference.run.steps[step][stage][name]
    if stage == "gradients":
        return bool(value.any())
    if stage == "buffers" or (stage == "parameters" and name in trainable):
        first = reference.run.steps[0]["initial_state"]
        initial = reference.run.steps[step].get("initial_state", first).get(name)
        return initial is None or not torch.equal(value, initial)
    return True


def _add_exact(
    tensors: dict[str, Tensor],
    reference: Reference,
    noise: Noise,
    step: int,
    stage: str,
    name: str,
) -> None:
    """Add the float64 references of one tensor where they say more than the tensor itself."""
    value = reference.run.steps[step][stage][name]
    if not is_rounding(value) or stage in ("initial_state", "inputs"):
        return
    for run in RUNS:
        if run == "anchored" and not _is_anchored(noise, (step, stage, name), value.numel()):
            continue
        steps = exact_steps(reference, run)
        exact = steps[step].get(stage, {}).get(name) if steps else None
        if exact is not None and exact is not value and exact.shape == value.shape:
            tensors[_key(f"{run}64", stage, name)] = exact


def _add_rows(tensors: dict[str, Tensor], run: str, stage: str, name: str, floor: Floor) -> None:
    """Add a floor's numbers by row."""
    tensors[_key(f"{run}.noise", stage, name)] = floor.noise_rows
    tensors[_key(f"{run}.scale", stage, name)] = floor.scale_rows
    if floor.undetermined_rows is not None:
        tensors[_key(f"{run}.undetermined", stage, name)] = floor.undetermined_rows


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors takes them: real, contiguous, none sharing memory."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, value in tensors.items():
        real = as_real(value.detach()).cpu().contiguous()
        if real.untyped_storage().data_ptr() in seen:
            real = real.clone()
        seen.add(real.untyped_storage().data_ptr())
        found[key] = real
    return found


def _key(source: str, stage: str, name: str) -> str:
    """Return the key of a tensor in a step's file."""
    return f"{source}|{stage}|{name}"


def _file(step: int) -> str:
    """Return the file name of a step."""
    return f"step-{step:04d}.safetensors"
