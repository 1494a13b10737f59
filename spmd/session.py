"""A compiled step: when to capture, when to reuse, and how one call runs.

Calls capture until two in a row give the same graph; from then on it is reused while what
it was specialised on stays the same. All ranks decide together, before anything runs: each
votes for the executable it would use, and it is used if all voted for the same one.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from spmd.capture import Program, capture
from spmd.entries import CAPTURE, LARGEST_ENTRY, CaptureCache, Entry, Executable, Options
from spmd.errors import CaptureError, SizeChanged
from spmd.layout import Layout
from spmd.lifting import World, lift, path_name
from spmd.localize import Divergence, Localizer, Visit, global_values
from spmd.overrides import apply_overrides
from spmd.passes import checked_graph
from spmd.placed import Placed
from spmd.planning import owner_of
from spmd.program import Kept, Lifted, Write
from spmd.results import unpacked
from spmd.structure import fingerprint
from spmd.writeback import set_state


class _TellOthers(AbstractContextManager[None]):
    """Calls `tell` with the exception that leaves its body."""

    def __init__(self, tell: Callable[[Exception], None]) -> None:
        self._tell = tell

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            self._tell(error)


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
        # Entered around every capture and partition; for those who measure.
        self.capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.captures = 0
        self.calls = 0
        self._entries: dict[Any, Entry] = {}
        self._executable: Executable | None = None
        self._world: World | None = None
        self._known: dict[Any, Entry] = {}
        self._entry = Entry()
        self._serial = 0
        # Python numbers the step changes; they become inputs, or every call would capture.
        self._counters: frozenset[str] = frozenset()
        self._overridden: weakref.WeakSet[Any] = weakref.WeakSet()

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
        with self._together():
            world = self._world = self._lift(args, kwargs)
        self._enter(world)
        executable = self._chosen(world)
        executable, outputs = self._answered(executable, world)
        self.calls += 1
        self._entry.calls += 1
        self._executable = executable
        with torch.no_grad():
            self._write(executable, world, outputs)
        placed = [self._placed(v, x) for v, x in zip(outputs, executable.outputs, strict=True)]
        program = executable.program
        self.results = unpacked(program.result_spec, program.result_constants, placed)
        firsts = [self._locals(v)[0] for v in outputs]
        return unpacked(program.result_spec, program.result_constants, firsts)

    def _lift(self, args: Any, kwargs: Any) -> World:
        world = lift(self.function, args, kwargs, self._counters)
        if self.options.overrides and world.model not in self._overridden:
            self._overridden.add(world.model)
            apply_overrides(world.model, self.options.overrides)
            world = lift(self.function, args, kwargs, self._counters)
        return world

    def _chosen(self, world: World) -> Executable:
        """Return the executable all ranks use first in this call; sets `_entry`.

        A rank that has seen its own arguments before votes for what it used then. Where
        the votes differ, the ranks tell each other their shapes.
        """
        local = (id(world.model), id(world.optimizer), world.static, _hooks(world))
        known = self._known.get(local)
        vote = self._vote_of(known) if known is not None else CAPTURE
        if self._agree(vote) and known is not None:
            self._entry = known
            return known.executables[0]
        with self._together():
            found = self._described(world)
        key = (local, tuple(sorted(found.shapes.items())))
        entry = self._entry = self._known[local] = self._entries.setdefault(key, found)
        if self._agree(self._vote_of(entry)):
            return entry.executables[0]
        return self._captured(entry, world)

    def _answered(self, executable: Executable, world: World) -> tuple[Executable, list[Any]]:
        """Run an executable whose data-dependent sizes are those of this call."""
        entry, generator = self._entry, torch.get_rng_state()
        tried: list[Executable] = []
        fresh: Executable | None = None
        while True:
            try:
                return executable, self._run(executable, world)
            except SizeChanged as changed:
                torch.set_rng_state(generator)
                if executable is fresh:
                    raise CaptureError(
                        f"a value the step is specialised on is another one in the local graph: "
                        f"{changed}. It depends on rounding; make the decision robust.",
                        None,
                        "unstable-size",
                    ) from changed
                tried.append(executable)
                others = [e for e in entry.executables if e not in tried]
                if self._agree(others[0].serial if others else CAPTURE):
                    executable = others[0]
                else:
                    executable = fresh = self._captured(entry, world, keep=True)

    def localize(self, *args: Any, **kwargs: Any) -> Divergence | None:
        """Return the first operator the local graph computes differently, or None.

        The arguments are those of a step; nothing is written back, the random generator
        stays where it is. Collective; every rank returns what it saw itself.
        """
        world = self._world = self._lift(args, kwargs)
        self._enter(world)
        executable = self._chosen(world)
        program = executable.program
        specs = program.graph.meta["signature"].inputs
        generator = torch.get_rng_state()
        try:
            whole = [self._fetch(world, i) for i in range(len(world.values))]
            whole += [tensor.detach().clone() for tensor in program.captured]
            values = global_values(program.graph, whole[: len(specs)])
            torch.set_rng_state(generator)
            search = Localizer(program.graph, values, self._coordinates())
            self._walk(executable.graph, self._inputs(executable, world), search.visit)
        finally:
            torch.set_rng_state(generator)
        return search.found

    def _placed(self, value: Any, layout: Layout) -> Placed:
        return Placed(self._locals(value), layout)

    def _vote_of(self, entry: Entry) -> int:
        """Return the number of the executable this rank would use again, or `CAPTURE`."""
        every = self.options.recapture_every
        due = every is not None and entry.calls and entry.calls % every == 0
        return entry.executables[0].serial if entry.stable and not due else CAPTURE

    def _captured(self, entry: Entry, world: World, keep: bool = False) -> Executable:
        """Capture the step; what is there is used again if it is the same program."""
        with self.capturing():
            return self._captured_anew(entry, world, keep)

    def _captured_anew(self, entry: Entry, world: World, keep: bool) -> Executable:
        with self._together(), self._common_stream():
            program = self._program(world, entry.shapes)
        mark = fingerprint(program)
        same = bool(entry.executables) and mark == entry.fingerprint
        if self._agree(entry.executables[0].serial if same else CAPTURE):
            entry.stable = self._is_common(program)
            executable = entry.executables[0]
            executable.program = replace(program, graph=executable.program.graph)
            return executable
        with self._together():
            executable = self._partitioned(program, world)
        self._refuse_different(executable)
        entry.fingerprint, entry.stable = mark, keep and self._is_common(program)
        kept = entry.executables[: LARGEST_ENTRY - 1] if keep else []
        entry.executables = [executable, *kept]
        return executable

    def _together(self) -> AbstractContextManager[None]:
        """Return a context that tells the other ranks if its body fails on this one."""
        return _TellOthers(self._give_up)

    def _program(self, world: World, shapes: dict[int, tuple[int, ...]]) -> Program:
        key = (self.calls, world.static)
        if self.shared is not None and key in self.shared.programs:
            self._counters |= self.shared.programs[key].counters
            return self.shared.programs[key]
        program = capture(
            self.function,
            world,
            fetch=lambda position: self._fetch(world, position),
            shapes=shapes.get,
        )
        self.captures += 1
        self._counters |= program.counters
        if self.shared is not None and program.is_portable:
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
        mode.strict = self.options.strict
        local = mode.partition(
            program.graph, world.model, world.optimizer,
            {**by_kind["parameter"], **by_kind["buffer"]}, states, args, kwargs,
        )  # fmt: skip
        layouts = local.meta["layouts"]
        local = checked_graph(
            mode.transform_and_compile(local), "transform_and_compile of the mode"
        )
        for override in self.options.overrides:
            name = f"{type(override).__name__}.transform"
            local = checked_graph(override.transform(local, world.values), name)
        if self.options.gm_transformation is not None:
            local = checked_graph(self.options.gm_transformation(local), "gm_transformation")
        self._dump(program, local)
        self._serial += 1
        return Executable(
            program, self._bind(local), layouts["inputs"], layouts["outputs"], self._serial
        )

    def _dump(self, program: Program, local: fx.GraphModule) -> None:
        if self.options.dump_graphs is None:
            return
        import pathlib

        folder = pathlib.Path(self.options.dump_graphs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"global_{self.captures}.graph").write_text(str(program.graph.graph))
        (folder / f"local_{self.captures}.graph").write_text(str(local.graph))

    def _run(self, executable: Executable, world: World) -> list[Any]:
        with torch.no_grad():
            return list(self._execute(executable.graph, self._inputs(executable, world)))

    def _inputs(self, executable: Executable, world: World) -> list[Any]:
        """Return the local value of every placeholder."""
        inputs = []
        specs = executable.program.graph.meta["signature"].inputs
        values = [*world.values, *executable.program.captured_now()]
        for position, (spec, layout) in enumerate(zip(specs, executable.inputs, strict=True)):
            inputs.append(self._read(position, spec, values[position], layout))
        return inputs

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
            if spec.kind == "argument":
                self._store_argument(position, held, value, executable.outputs[index])
                continue
            self._store(spec.kind, spec.name, held, value, executable.outputs[index])
        for write in program.writes:
            self._apply(write, world, outputs, executable.outputs)
        self._write_numbers(program, world, outputs)
        for name in program.cleared_gradients:
            self._clear_gradient(name)

    def _apply(self, write: Write, world: World, outputs: list[Any], layouts: list[Layout]) -> None:
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
            s.name: v
            for s, v in zip(world.specs, world.values, strict=True)
            if s.kind == "parameter"
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

    def _enter(self, world: World) -> None:
        """Make what the world holds the same on all ranks where it is new."""

    def _described(self, world: World) -> Entry:
        """Return a new entry with the shapes of the global arguments."""
        return Entry()

    def _agree(self, vote: int) -> bool:
        """Return whether all ranks voted for the same executable."""
        return vote >= 0

    def _give_up(self, error: Exception) -> None:
        """Tell the other ranks that this one failed."""

    def _is_common(self, program: Program) -> bool:
        """Whether the values the program is specialised on are the same on all ranks."""
        return True

    def _refuse_different(self, executable: Executable) -> None:
        """Raise unless all ranks compiled the same collectives."""

    def _common_stream(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks draw the same random numbers."""
        return nullcontext()

    @abstractmethod
    def _fetch(self, world: World, position: int) -> Tensor: ...

    @abstractmethod
    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule: ...

    @abstractmethod
    def _read(self, position: int, spec: Any, value: Any, layout: Layout) -> Any: ...

    @abstractmethod
    def _execute(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]: ...

    @abstractmethod
    def _walk(self, graph: fx.GraphModule, inputs: list[Any], visit: Visit) -> None: ...

    @abstractmethod
    def _coordinates(self) -> list[tuple[int, ...]]: ...

    @abstractmethod
    def _store(self, kind: str, name: str, held: Any, value: Any, layout: Layout) -> None: ...

    def _store_argument(self, position: int | None, held: Any, value: Any, layout: Layout) -> None:
        """Write what the step did to an argument in place into the caller's tensor."""
        self._store("argument", "", held, value, layout)

    @abstractmethod
    def _clear_gradient(self, name: str) -> None: ...

    @abstractmethod
    def _locals(self, value: Any) -> list[Any]: ...


def _hooks(world: World) -> tuple[int, ...]:
    """Return what names the hooks that run in the step: they are captured with it."""
    tables: list[Any] = []
    for value in world.values:
        if isinstance(value, nn.Parameter):
            tables += [value._backward_hooks, value._post_accumulate_grad_hooks]
    for module in world.model.modules():
        tables += [
            module._forward_pre_hooks, module._forward_hooks,
            module._backward_pre_hooks, module._backward_hooks,
        ]  # fmt: skip
    return tuple(id(hook) for table in tables for hook in (table or {}).values())
