"""`spmd_verify.record(model, optimizer, path)`: a dump of any training script, in two lines.

Observes the first steps by hooks of the optimizer and of torch's clipping functions: it clones
and detaches, and changes nothing. What a rank holds is kept in memory until the last of these
steps is over; then the rank writes its dump (`dump.write_rank`).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd_verify.dtensor_layouts import (
    is_distributed,
    is_odd_partial,
    layout_of,
    local_of,
    root_mesh,
)
from spmd_verify.dumps import dump
from spmd_verify.dumps.format import DumpError, Key
from spmd_verify.errors import UsageError
from spmd_verify.layouts import Replicate
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import (
    named_buffers,
    named_parameters,
    named_state,
    optimizers_of,
)

# The stages of an Observer that this recorder keeps; inputs have no layout that could be known.
_INNER = ("gradients", "clipping")


@dataclass(frozen=True)
class Place:
    """Where this rank is.

    Attributes:
        rank: From 0.
        world_size: Number of ranks.
        axes: Mesh axes, `{name: ranks}`; none without a process group.
        coordinate: This rank's position.
        mesh: The mesh of all ranks, or None where no tensor and nobody gave one.
    """

    rank: int
    world_size: int
    axes: Mapping[str, int]
    coordinate: tuple[int, ...]
    mesh: Any = None


def record(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    path: str | Path,
    *,
    steps: int = 3,
    mesh: Any = None,
) -> Recorder:
    """Record the first optimizer steps of a training script as a dump.

    Call it once, on every rank, after model and optimizer are built. Parameters and buffers are
    recorded now (`initial_state`); then per step gradients before `optimizer.step` and before
    clipping, and optimizer state, parameters and buffers after it. Copies are kept on the CPU:
    about `4 * steps + 1` times the size of this rank's parameters under Adam.

    Args:
        model: The module, wrapped or not; names are written without what wrappers add.
        optimizer: One or several. With several a step is over when each has stepped once.
        path: Folder of the dump, the same on every rank.
        steps: How many steps; the dump is written after the last of them, on `close()`, or
            when the script ends.
        mesh: `DeviceMesh` of all ranks; read off the first DTensor when left out. A script
            without DTensors has one axis, `dp`.

    Returns:
        The recorder; also a context that closes it.

    Raises:
        UsageError: `record-optimizer`, `record-steps`.
        DumpError: `dump-not-written`.
    """
    optimizers = optimizers_of(optimizer)
    kinds = [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]
    if kinds or not optimizers:
        raise UsageError(
            f"Cannot record these optimizers: {optimizer!r}. Got {', '.join(kinds) or 'none'}, "
            f"expected torch.optim.Optimizer or a list of them: its step has the hooks",
            slug="record-optimizer",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(
            f"Cannot record these steps: steps={steps!r}. Expected a number from 1",
            slug="record-steps",
        )
    return Recorder(model, optimizers, Path(path), steps, mesh)


class Recorder:
    """Observes a script; see `record`.

    Attributes:
        path: Folder of the dump.
        steps: How many steps are recorded.
        step: The step that runs now or comes next, from 0.
        is_closed: Whether the dump was written.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], path: Path, steps: int, mesh: Any
    ) -> None:
        """Record the initial state and hook the optimizers."""
        self.path, self.steps, self.step, self.is_closed = path, steps, 0, False
        self._model, self._optimizers = model, optimizers
        self._place = _place(model, mesh)
        self._entries: dict[str, dump.Entry] = {}
        self._stepped: set[int] = set()
        self._remove_old()
        self._read_model("initial_state", {**self._parameters(), **self._buffers()})
        # Ours first: what belongs to the step before is taken out before gradients are read.
        self._hooks = ExitStack()
        for single in optimizers:
            for handle in (
                single.register_step_pre_hook(self._before_step),
                single.register_step_post_hook(self._after_step),
            ):
                self._hooks.callback(handle.remove)
        self._hooks.callback(model.register_forward_pre_hook(self._before_forward).remove)
        self._observer = Observer(model, optimizers, with_module_outputs=False)
        self._observer.with_inputs = False
        self._hooks.push(self._observer)
        self._observer.__enter__()
        atexit.register(self.close)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the dump of the steps seen so far and take all hooks off; a second call does
        nothing.

        Raises:
            DumpError: `dump-not-written`.
        """
        if self._stepped and not self.is_closed:
            self._finish_step()
        if not self.is_closed:
            self._write()
        self._hooks.close()

    def _write(self) -> None:
        """Write what was read; hooks that may be running now stay until the next forward."""
        self.is_closed = True
        atexit.unregister(self.close)
        place, entries, self._entries = self._place, self._entries, {}
        dump.write_rank(
            self.path,
            rank=place.rank,
            world_size=place.world_size,
            axes=place.axes,
            coordinate=place.coordinate,
            entries=entries,
        )

    # -- one step ----------------------------------------------------------------------------

    def _before_forward(self, _model: nn.Module, _args: Any) -> None:
        """Take the hooks off once all is written: no optimizer runs its hooks now."""
        if self.is_closed:
            self._hooks.close()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Finish the step before where this optimizer begins the next one."""
        if id(optimizer) in self._stepped and not self.is_closed:
            self._finish_step()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Finish the step when the last optimizer has stepped."""
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers) and not self.is_closed:
            self._finish_step()

    def _finish_step(self) -> None:
        """Take what was observed in this step, read the state after it, go on to the next."""
        self._stepped.clear()
        for stage in _INNER:
            self._read_model(stage, self._observer.record[stage])
        self._observer.restart()
        self._read_state()
        self._read_model("parameters", self._parameters())
        self._read_model("buffers", self._buffers())
        self.step += 1
        if self.step == self.steps:
            self._write()

    # -- reading -----------------------------------------------------------------------------

    def _parameters(self) -> Mapping[str, Tensor]:
        """Return the live parameters."""
        return named_parameters(self._model)[0]

    def _buffers(self) -> Mapping[str, Tensor]:
        """Return the live buffers."""
        return named_buffers(self._model)[0]

    def _read_model(self, stage: str, values: Mapping[str, Any]) -> None:
        """Keep copies of tensors under a stage of this step."""
        for name, value in values.items():
            key = str(Key("free", self.step, stage, name))
            self._entries[key] = _entry(value, self._place)

    def _read_state(self) -> None:
        """Keep copies of optimizer state; numbers become 0-dim float64."""
        state = {
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, holder, key in named_state(self._model, self._optimizers)
            for value in [holder[key]]
        }
        self._read_model("optimizer_state", state)

    def _remove_old(self) -> None:
        """Take away what an earlier run left, so that nobody reads it as this one's."""
        old = self.path / f"rank-{self._place.rank:05d}.json"
        try:
            old.unlink(missing_ok=True)
        except OSError as error:
            raise DumpError(
                f"Cannot write the dump: {old}. Got {error!r}. Name a folder that can be written",
                slug="dump-not-written",
            ) from error


def _place(model: nn.Module, mesh: Any) -> Place:
    """Return where this rank is: from the process group, and the mesh of its DTensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return Place(0, 1, {}, ())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = mesh if mesh is not None else root_mesh(model)
    if mesh is None or mesh.size() != world_size or mesh.get_coordinate() is None:
        return Place(rank, world_size, {"dp": world_size}, (rank,))
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    axes = dict(zip(names, mesh.shape, strict=True))
    return Place(rank, world_size, axes, tuple(mesh.get_coordinate()), mesh)


def _entry(value: Any, place: Place) -> dump.Entry:
    """Return a copy of a tensor with its layout: of a DTensor its own, of others none."""
    shape: tuple[int, ...] | None = None
    layout: Any = None
    with torch.no_grad():
        if is_odd_partial(value):  # a norm whose ranks are not summed but squared first
            value = value.full_tensor()
            shape, layout = tuple(value.shape), (Replicate(),) * len(place.axes)
        local = local_of(value)
        if local.layout != torch.strided:
            local = local.to_dense()
        local = local.detach().to("cpu", copy=True)
    if place.world_size == 1:
        shape, layout = tuple(local.shape), (Replicate(),) * len(place.axes)
    elif is_distributed(value):
        layout = layout_of(value, tuple(local.shape), place.axes, place.mesh)
        shape = tuple(value.shape) if layout is not None else None
    return dump.Entry(local, shape, layout)
