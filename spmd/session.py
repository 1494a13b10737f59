"""A compiled step: when to capture, when to reuse, and how one call runs.

Calls capture until two in a row give the same graph; from then on it is reused while what
it was specialised on stays the same. All ranks decide together, before anything runs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from spmd.capture import Program, capture
from spmd.errors import SizeChanged
from spmd.layout import Layout
from spmd.lifting import World, lift, path_name
from spmd.mode import ParallelMode
from spmd.overrides import Override, apply_overrides
from spmd.placed import Placed
from spmd.planning import owner_of
from spmd.program import Kept, Lifted, Write
from spmd.structure import fingerprint
from spmd.writeback import rebuilt, set_state


@dataclass
class Options:
    """The arguments of `compile`, see there."""

    mode: ParallelMode
    overrides: list[Override] = field(default_factory=list)
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    batch: str = "local"
    strict: bool = False
    dump_graphs: str | None = None
    recapture_every: int | None = None


@dataclass
class Executable:
    """A program partitioned for the mesh, ready to run."""

    program: Program
    graph: fx.GraphModule
    inputs: list[Layout]
    outputs: list[Layout]


@dataclass
class Entry:
    """What is known for one set of shapes, arguments and flags.

    Attributes:
        fingerprint: Of the newest capture.
        stable: Whether two captures in a row agreed.
        executables: Newest first; more than one where data-dependent sizes differ.
        calls: Calls answered by this entry.
    """

    fingerprint: str = ""
    stable: bool = False
    executables: list[Executable] = field(default_factory=list)
    calls: int = 0


class CaptureCache:
    """Programs shared by several compiled copies of one step, by call number.

    The copies must be built alike; the step's Python runs for the first of them only.
    """

    def __init__(self) -> None:
        self.programs: dict[Any, Program] = {}


class CompiledStep(ABC):
    """A training step that runs partitioned over a mesh.

    Attributes:
        graph: The local graph of the last call, after the passes.
        program: The captured step of the last call.
        results: The last result, `Placed` at every tensor leaf.
        captures: How often the step was captured.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, options
        self.shared: CaptureCache | None = None
        self.results: Any = None
        self.captures = 0
        self.calls = 0
        self._entries: dict[Any, Entry] = {}
        self._executable: Executable | None = None
        self._world: World | None = None
        self._overridden: set[int] = set()

    @property
    def graph(self) -> fx.GraphModule:
        """The local graph of the last call, after the passes."""
        return self._last().graph

    @property
    def program(self) -> Program:
        """The captured step of the last call."""
        return self._last().program

    @property
    def fallbacks(self) -> dict[str, int]:
        """Operators that were gathered and replicated for want of a rule, with counts."""
        return dict(self.graph.meta.get("fallbacks", {}))

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives in the local graph, with counts."""
        counts: dict[str, int] = {}
        for node in self.graph.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
                name = target._schema.name.split("::")[1]
                if name != "wait_tensor":
                    counts[name] = counts.get(name, 0) + 1
        return counts

    def _last(self) -> Executable:
        if self._executable is None:
            raise AttributeError("the step was not called yet")
        return self._executable

    # -- one call ------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; see `spmd.compile`."""
        kwargs.pop("last_train_step", None)
        world = lift(self.function, args, kwargs)
        if id(world.model) not in self._overridden and self.options.overrides:
            self._overridden.add(id(world.model))
            apply_overrides(world.model, self.options.overrides)
            world = lift(self.function, args, kwargs)
        self._world = world
        shapes = self._shapes(world)
        key = (id(world.model), id(world.optimizer), world.static, tuple(sorted(shapes.items())))
        entry = self._entries.setdefault(key, Entry())
        executable = self._reusable(entry) or self._captured(entry, world, shapes)
        generator = torch.get_rng_state()
        tried: list[Executable] = []
        while True:
            try:
                outputs = self._run(executable, world)
                break
            except SizeChanged:
                torch.set_rng_state(generator)
                tried.append(executable)
                others = [e for e in entry.executables if e not in tried]
                executable = others[0] if others else self._captured(entry, world, shapes, keep=True)
        self.calls += 1
        entry.calls += 1
        self._executable = executable
        with torch.no_grad():
            self._write(executable, world, outputs)
        placed = [self._placed(v, x) for v, x in zip(outputs, executable.outputs, strict=True)]
        program = executable.program
        self.results = rebuilt(program.result_spec, program.result_constants, placed)
        firsts = [self._locals(v)[0] for v in outputs]
        return rebuilt(program.result_spec, program.result_constants, firsts)

    def _placed(self, value: Any, layout: Layout) -> Placed:
        return Placed(self._locals(value), layout)

    def _reusable(self, entry: Entry) -> Executable | None:
        every = self.options.recapture_every
        due = every is not None and entry.calls and entry.calls % every == 0
        again = not entry.stable or bool(due)
        return None if self._agree(again) else entry.executables[0]

    def _captured(
        self, entry: Entry, world: World, shapes: dict[int, tuple[int, ...]], keep: bool = False
    ) -> Executable:
        program = self._program(world, shapes)
        mark = fingerprint(program)
        same = bool(entry.executables) and mark == entry.fingerprint
        if not self._agree(not same):
            entry.stable = True
            executable = entry.executables[0]
            executable.program = replace(program, graph=executable.program.graph)
            return executable
        entry.fingerprint, entry.stable = mark, keep
        executable = self._partitioned(program, world)
        entry.executables = [executable, *(entry.executables if keep else [])]
        return executable

    def _program(self, world: World, shapes: dict[int, tuple[int, ...]]) -> Program:
        key = (self.calls, world.static)
        if self.shared is not None and key in self.shared.programs:
            return self.shared.programs[key]
        program = capture(
            self.function,
            world,
            fetch=lambda position: self._fetch(world, position),
            shapes=shapes.get,
        )
        self.captures += 1
        if self.shared is not None:
            self.shared.programs[key] = program
        return program

    def _partitioned(self, program: Program, world: World) -> Executable:
        mode = self.options.mode
        values = [n.meta.get("val") for n in program.graph.graph.find_nodes(op="placeholder")]
        by_kind: dict[str, dict[str, Any]] = {"parameter": {}, "buffer": {}, "state": {}}
        for spec, value in zip(program.graph.meta["signature"].inputs, values, strict=True):
            if spec.kind in by_kind:
                by_kind[spec.kind][spec.name] = value
        states: dict[str, dict[str, Any]] = {}
        for name, value in by_kind["state"].items():
            owner = owner_of(name, by_kind["parameter"]) or "hyper"
            states.setdefault(owner, {})[name.removeprefix(f"{owner}.")] = value
        args, kwargs = pytree.tree_unflatten(
            [getattr(leaf, "position", leaf) for leaf in world.flat_args], world.args_spec
        )
        if self.options.strict:
            mode.strict = True  # type: ignore[attr-defined]
        local = mode.partition(
            program.graph, world.model, world.optimizer,
            {**by_kind["parameter"], **by_kind["buffer"]}, states, args, kwargs,
        )  # fmt: skip
        layouts = local.meta["layouts"]
        local = mode.transform_and_compile(local)
        for override in self.options.overrides:
            local = override.transform(local, world.values)
        if self.options.gm_transformation is not None:
            local = self.options.gm_transformation(local)
        self._dump(program, local)
        return Executable(program, self._bind(local), layouts["inputs"], layouts["outputs"])

    def _dump(self, program: Program, local: fx.GraphModule) -> None:
        if self.options.dump_graphs is None:
            return
        import pathlib

        folder = pathlib.Path(self.options.dump_graphs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"global_{self.captures}.graph").write_text(str(program.graph.graph))
        (folder / f"local_{self.captures}.graph").write_text(str(local.graph))

    def _run(self, executable: Executable, world: World) -> list[Any]:
        inputs = []
        specs = executable.program.graph.meta["signature"].inputs
        values = [*world.values, *executable.program.captured_now()]
        for position, (spec, layout) in enumerate(zip(specs, executable.inputs, strict=True)):
            inputs.append(self._read(position, spec, values[position], layout))
        with torch.no_grad():
            return list(self._execute(executable.graph, inputs))

    def _write(self, executable: Executable, world: World, outputs: list[Any]) -> None:
        program = executable.program
        specs = program.graph.meta["signature"].outputs
        positions = {(s.kind, s.name): i for i, s in enumerate(world.specs)}
        placed = {i for w in program.writes for i in w.outputs()}
        for index, (spec, value) in enumerate(zip(specs, outputs, strict=True)):
            if spec.kind in ("result", "hyper") or index in placed:
                continue
            position = positions.get((spec.kind, spec.name))
            held = world.values[position] if position is not None else None
            if held is None and spec.kind == "captured" and spec.name.startswith("constant."):
                held = program.captured_now()[int(spec.name.split(".")[1])]
            self._store(spec.kind, spec.name, held, value, executable.outputs[index])
        for write in program.writes:
            self._apply(write, world, outputs, executable.outputs)
        self._write_numbers(program, world, outputs)
        for name in program.cleared_gradients:
            self._clear_gradient(name)

    def _apply(
        self, write: Write, world: World, outputs: list[Any], layouts: list[Layout]
    ) -> None:
        """Put a new value into its slot; buffers keep their tensor where the shape allows."""
        if write.kind == "buffer":
            index = write.value.position
            held = write.place.get()
            self._store("buffer", write.place.name, held, outputs[index], layouts[index])
            return
        write.apply([self._locals(v)[0] for v in outputs])

    def _write_numbers(self, program: Program, world: World, outputs: list[Any]) -> None:
        """Set Python values: in the optimizer's state and wherever else the step did."""
        parameters = {
            s.name: v for s, v in zip(world.specs, world.values, strict=True) if s.kind == "parameter"
        }
        specs = program.graph.meta["signature"].outputs
        for name, entry in program.new_state.items():
            assert world.optimizer is not None
            for path, leaf in pytree.tree_flatten_with_path(entry)[0]:
                if isinstance(leaf, Lifted) and specs[leaf.position].kind == "hyper":
                    leaf = self._locals(outputs[leaf.position])[0]
                if not isinstance(leaf, Lifted | Kept | Tensor):
                    set_state(world.optimizer.state[parameters[name]], path_name(path), leaf)
        for place, value in program.python.values():
            place.set(value)
        for name, flag in program.requires_grad.items():
            parameters[name].requires_grad_(flag)

    # -- what differs between one rank and lock-step -------------------------------------

    @abstractmethod
    def state(self) -> dict[str, dict[str, Placed]]:
        """Return parameters, buffers, optimizer_state and gradients as they are held.

        The tensors are the live ones: copying into them changes what the next call reads.
        """

    @abstractmethod
    def _shapes(self, world: World) -> dict[int, tuple[int, ...]]: ...

    @abstractmethod
    def _fetch(self, world: World, position: int) -> Tensor: ...

    @abstractmethod
    def _agree(self, flag: bool) -> bool: ...

    @abstractmethod
    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule: ...

    @abstractmethod
    def _read(self, position: int, spec: Any, value: Any, layout: Layout) -> Any: ...

    @abstractmethod
    def _execute(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]: ...

    @abstractmethod
    def _store(self, kind: str, name: str, held: Any, value: Any, layout: Layout) -> None: ...

    @abstractmethod
    def _clear_gradient(self, name: str) -> None: ...

    @abstractmethod
    def _locals(self, value: Any) -> list[Any]: ...
