"""All ranks of a mesh in this process: the same compiled step without processes.

The fast way to test the engine, and the only one for hundreds of ranks. Only graphs of
the engine's modes run here; eager torch styles need processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from spmd.emulator import PerRank, run_lockstep
from spmd.entries import CaptureCache, Options
from spmd.errors import InternalError, UsageError
from spmd.layout import Layout, Shard
from spmd.lifting import World, tensor_of
from spmd.localize import Visit
from spmd.mesh import MeshShape, mesh_shape
from spmd.mode import ParallelMode
from spmd.overrides import Override
from spmd.placed import Placed
from spmd.planning import owner_of
from spmd.ranks import joined, part_of
from spmd.session import CompiledStep
from spmd.writeback import set_module_tensor, set_state

__all__ = ["CaptureCache", "LockstepStep", "PerRank", "assembled", "compile", "run_lockstep"]


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    mesh: Any,
    captures: CaptureCache | None = None,
    strict: bool = False,
    dump_graphs: str | None = None,
    recapture_every: int | None = None,
) -> Callable[[Callable[..., Any]], LockstepStep]:
    """Compile a training step for all ranks of `mesh` in this process.

    Args:
        module_override: As in `spmd.compile`.
        gm_transformation: As in `spmd.compile`.
        parallel_mode: As in `spmd.compile`; `DataParallel()` by default. Its mesh is set
            to `mesh`.
        mesh: `{axis: size}` or `MeshShape`; any world size.
        captures: Share captures between several compiled copies of one step.
        strict: As in `spmd.compile`.
        dump_graphs: As in `spmd.compile`.
        recapture_every: As in `spmd.compile`.

    Returns:
        A decorator. The step is called once with the global batch; the module and the
        optimizer hold the assembled global values after each call.
    """
    from spmd.data_parallel import DataParallel

    mode = parallel_mode or DataParallel()
    if mode.gradient_reduction == "mean":
        raise UsageError(
            "gradient_reduction='mean' gives every rank a graph of its own, lock-step runs one "
            "graph for all. Use processes.",
            "lockstep-mean",
        )
    mode.mesh = mesh_shape(mesh)
    options = Options(
        mode,
        module_override or [],
        gm_transformation,
        "global",
        strict,
        dump_graphs,
        recapture_every,
    )

    def decorate(function: Callable[..., Any]) -> LockstepStep:
        step = LockstepStep(function, options)
        step.shared = captures
        return step

    return decorate


def assembled(value: Any, layout: Layout, mesh: MeshShape) -> Any:
    """Return the global tensor of per-rank parts; replicas are taken from the first rank.

    Args:
        value: A `PerRank` of local tensors, or a value shared by all ranks.
        layout: Where the parts lie; not partial.
        mesh: Axis names and sizes.
    """
    if not isinstance(value, PerRank):
        return value
    parts = {c: value[i] for i, c in enumerate(mesh.coordinates())}
    for axis in reversed(range(len(mesh.sizes))):
        placement = layout.placements[axis]
        together: dict[tuple[int, ...], Any] = {}
        for head in dict.fromkeys(c[:axis] for c in parts):
            row = [parts[(*head, i)] for i in range(mesh.sizes[axis])]
            together[head] = joined(row, placement) if isinstance(placement, Shard) else row[0]
        parts = together
    return parts[()]


Parts = dict[tuple[str, str], tuple[Any, Layout]]


class LockstepStep(CompiledStep):
    """A compiled step that holds the parts of every rank."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        super().__init__(function, options)
        self.mesh = mesh_shape(options.mode.mesh)
        self._models: weakref.WeakKeyDictionary[Any, Parts] = weakref.WeakKeyDictionary()

    @property
    def _parts(self) -> Parts:
        """The parts of what the model of this call holds, by kind and name."""
        return self._models.setdefault(self._world.model, {}) if self._world is not None else {}

    def state(self) -> dict[str, dict[str, Placed]]:
        """Return parameters, buffers, optimizer_state and gradients as they are held."""
        found: dict[str, dict[str, Placed]] = {
            "parameters": {}, "buffers": {}, "optimizer_state": {}, "gradients": {}
        }  # fmt: skip
        table = {"parameter": "parameters", "buffer": "buffers", "state": "optimizer_state",
                 "gradient": "gradients"}  # fmt: skip
        for (kind, name), (value, layout) in self._parts.items():
            if kind in table:
                found[table[kind]][name] = Placed(self._locals(value), layout)
        return found

    def _fetch(self, world: World, position: int) -> Tensor:
        spec, value = world.specs[position], world.values[position]
        if (spec.kind, spec.name) in self._parts:
            return assembled(*self._parts[spec.kind, spec.name], self.mesh).detach().clone()
        if isinstance(value, Tensor):
            return value.detach().clone()
        return tensor_of(value)

    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        return graph

    def _read(self, position: int, spec: Any, value: Any, layout: Layout) -> Any:
        key = (spec.kind, spec.name)
        if spec.kind in ("argument", "hyper", "captured"):
            return self._split(value, layout)
        if key in self._parts and self._parts[key][1] != layout:
            have, old = self._parts[key]
            self._parts[key] = (self._split(assembled(have, old, self.mesh), layout), layout)
        if key not in self._parts:
            self._parts[key] = (self._split(value.detach().clone(), layout), layout)
        return self._parts[key][0]

    def _split(self, value: Any, layout: Layout) -> Any:
        if not isinstance(value, Tensor):
            return tensor_of(value)
        value = value.detach()
        if layout.is_replicated:
            return value
        return PerRank(part_of(value, layout, c).clone() for c in self.mesh.coordinates())

    def _execute(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        outputs = run_lockstep(graph, inputs, self.mesh)
        seen: set[int] = {id(t) for x in inputs for t in _each(x)}
        return [_unaliased(value, seen) for value in outputs]

    def _walk(self, graph: fx.GraphModule, inputs: list[Any], visit: Visit) -> None:
        run_lockstep(graph, inputs, self.mesh, visit)

    def _coordinates(self) -> list[tuple[int, ...]]:
        return self.mesh.coordinates()

    def _store(self, kind: str, name: str, held: Any, value: Any, layout: Layout) -> None:
        world = self._world
        assert world is not None
        whole = assembled(value, layout, self.mesh)
        if kind in ("parameter", "buffer", "state", "gradient"):
            self._parts[kind, name] = (value, layout)
        if kind == "gradient":
            _parameter(world, name).grad = whole.clone()
        elif isinstance(held, Tensor) and held.shape == whole.shape:
            held.detach().copy_(whole)
        elif kind == "argument":
            raise InternalError(f"input {name!r} was written with another shape {whole.shape}")
        elif kind == "state":
            owner = owner_of(name, {s.name: s for s in world.specs if s.kind == "parameter"})
            assert owner is not None
            assert world.optimizer is not None
            path = name.removeprefix(f"{owner}.")
            set_state(world.optimizer.state[_parameter(world, owner)], path, whole.clone())
        else:
            set_module_tensor(world.model, name, whole.clone())

    def _clear_gradient(self, name: str) -> None:
        assert self._world is not None
        _parameter(self._world, name).grad = None
        self._parts.pop(("gradient", name), None)

    def _locals(self, value: Any) -> list[Any]:
        return list(value) if isinstance(value, PerRank) else [value] * self.mesh.num_ranks


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, PerRank) else [value]


def _unaliased(value: Any, seen: set[int]) -> Any:
    """Clone tensors that another output or input already holds; remember the rest."""

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage().data_ptr() if x.numel() else id(x)
        if id(x) in seen or storage in seen or x.untyped_storage().nbytes() > x.nbytes:
            x = x.clone()
            storage = x.untyped_storage().data_ptr() if x.numel() else id(x)
        seen.update((id(x), storage))
        return x

    if not isinstance(value, PerRank):
        return own(value)
    done: dict[int, Any] = {}
    return PerRank(done.setdefault(id(x), own(x)) for x in value)


def _parameter(world: World, name: str) -> Any:
    for spec, value in zip(world.specs, world.values, strict=True):
        if spec.kind == "parameter" and spec.name == name:
            return value
    raise KeyError(name)
