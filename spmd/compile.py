"""`spmd.compile`: a single-device training step, run by every rank of a mesh."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from spmd.batch import local_parts, refuse_different
from spmd.data_parallel import DataParallel
from spmd.entries import CAPTURE, FAILED, Entry, Executable, Options
from spmd.errors import OtherRankError, UsageError
from spmd.layout import Layout, Shard
from spmd.lifting import World, find_model_and_optimizer, tensor_of
from spmd.localize import Visit, walk_rank
from spmd.mode import ParallelMode
from spmd.ops import SIZED, check_value
from spmd.overrides import Override
from spmd.placed import Placed
from spmd.planning import batch_dims, owner_of, sharded_on
from spmd.program import Program, Signature
from spmd.ranks import ProcessRanks, local_of
from spmd.session import CompiledStep
from spmd.writeback import follow_successors, replace_parameters, set_module_tensor, set_state


def compile(
    module_override: list[Override] | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    parallel_mode: ParallelMode | None = None,
    *,
    batch: str = "local",
    strict: bool = False,
    dump_graphs: str | None = None,
    recapture_every: int | None = None,
) -> Callable[[Callable[..., Any]], RankStep]:
    """Compile a training step for the mesh this process is a rank of.

    Args:
        module_override: Replace or hide submodules before capture.
        gm_transformation: Rewrites the local graph after the mode's passes, once per
            capture, before it first runs.
        parallel_mode: How the step is partitioned; `DataParallel("replicate")` by default.
        batch: `local`: every rank passes its own part of the batch, parts as torch.chunk
            makes them, and the same values of all other arguments. `global`: every rank
            passes the same global batch.
        strict: Refuse operators without a sharding rule instead of gathering their inputs.
        dump_graphs: Folder for the global and local graphs of every capture.
        recapture_every: Capture again every n calls and compare.

    Returns:
        A decorator for `step(model, optimizer, *batch)`. The compiled step is called by
        every rank; it returns the global loss on every rank. Module parameters become
        DTensors, in the module and in the optimizer.

    Raises:
        UsageError: `batch-kind`.
    """
    if batch not in ("local", "global"):
        raise UsageError(f"batch is {batch!r}, expected 'local' or 'global'.", "batch-kind")
    options = Options(
        parallel_mode or DataParallel(), module_override or [], gm_transformation, batch, strict,
        dump_graphs, recapture_every,
    )  # fmt: skip
    return lambda function: RankStep(function, options)


LayoutTable = dict[tuple[str, str], Layout]


class RankStep(CompiledStep):
    """A compiled step of one rank."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        super().__init__(function, options)
        self._ranks: ProcessRanks | None = None
        self._cut: World | None = None
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tables: weakref.WeakKeyDictionary[Any, LayoutTable] = weakref.WeakKeyDictionary()

    @property
    def ranks(self) -> ProcessRanks:
        """This process's place on the mesh."""
        if self._ranks is None:
            self._ranks = ProcessRanks(self.options.mode.mesh)
            if self._ranks.parts is None:
                self.options.mode.mesh = self._ranks.device_mesh
        return self._ranks

    @property
    def _layouts(self) -> LayoutTable:
        """Where the values of this call's model lie, by kind and name."""
        return self._tables.setdefault(self._world.model, {}) if self._world is not None else {}

    @property
    def _is_mean(self) -> bool:
        return self.options.mode.gradient_reduction == "mean"

    def state(self) -> dict[str, dict[str, Placed]]:
        """Return parameters, buffers, optimizer_state and gradients as they are held."""
        world = self._world
        found: dict[str, dict[str, Placed]] = {
            "parameters": {}, "buffers": {}, "optimizer_state": {}, "gradients": {}
        }  # fmt: skip
        if world is None:
            return found
        for (kind, name), layout in self._layouts.items():
            value = self._held(world, kind, name)
            if isinstance(value, Tensor):
                if not layout.is_replicated and self.ranks.global_shape(value) is None:
                    value = self.ranks.part(value, layout)
                table = {"parameter": "parameters", "buffer": "buffers",
                         "state": "optimizer_state", "gradient": "gradients"}  # fmt: skip
                found[table[kind]][name] = Placed([local_of(value.detach())], layout)
        return found

    def _held(self, world: World, kind: str, name: str) -> Any:
        parameters = {
            s.name: v
            for s, v in zip(world.specs, world.values, strict=True)
            if s.kind == "parameter"
        }
        if kind == "parameter":
            return parameters[name]
        if kind == "gradient":
            return parameters[name].grad
        if kind == "buffer":
            return dict(world.model.named_buffers(remove_duplicate=False)).get(name)
        owner = owner_of(name, parameters)
        if owner is None or world.optimizer is None:
            return None
        value: Any = world.optimizer.state.get(parameters[owner], {})
        for key in name.removeprefix(f"{owner}.").split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    # -- before the step -----------------------------------------------------------------

    def _lift(self, args: Any, kwargs: Any) -> World:
        model, optimizer = find_model_and_optimizer(args, kwargs)
        follow_successors(model, optimizer)
        return super()._lift(args, kwargs)

    def _enter(self, world: World) -> None:
        """Give every rank rank 0's values of a model or an optimizer that is new here."""
        owners = [o for o in (world.model, world.optimizer) if o is not None]
        if any(owner not in self._seen for owner in owners):
            self._agree(CAPTURE)
            with self._together():
                self.ranks.synchronise(
                    [
                        (f"{spec.kind} {spec.name!r}", value)
                        for spec, value in zip(world.specs, world.values, strict=True)
                        if spec.kind in ("parameter", "buffer", "gradient", "state")
                        and isinstance(value, Tensor)
                        and self.ranks.global_shape(value) is None
                    ]
                )
            self._seen.update(owners)

    def _described(self, world: World) -> Entry:
        entry = Entry()
        for position, value in enumerate(world.values):
            shape = self.ranks.global_shape(value)
            if shape is not None:
                entry.shapes[position] = shape
        if self.options.batch == "global":
            refuse_different(world, self.ranks)
            if self._is_mean:
                entry.own = self._own_parts(world)
        elif not self._is_mean:
            entry.parts = local_parts(world, self.ranks, self.options.mode)
        for position, layout in entry.parts.items():
            sizes = list(world.values[position].shape)
            for placement in layout.placements:
                if isinstance(placement, Shard):
                    sizes[placement.dim] = placement.size
            entry.shapes[position] = tuple(sizes)
        return entry

    def _own_parts(self, world: World) -> dict[int, Layout]:
        """Return where the parts of a global batch lie, of which each rank runs its own."""
        signature = Signature(world.specs)
        shapes = [tuple(getattr(v, "shape", ())) for v in world.values]
        dims = batch_dims(signature, shapes, getattr(self.options.mode, "input_batch_dim", 0))
        found = {}
        for position, spec in signature.of_kind("argument"):
            dim = dims[spec.name]
            if dim is not None:
                ranks = self.ranks.mesh.num_ranks
                found[position] = sharded_on(0, 1, dim, shapes[position][dim], ranks)
        return found

    def _chosen(self, world: World) -> Executable:
        executable = super()._chosen(world)
        self._keep_own(world)
        return executable

    def _captured(self, entry: Entry, world: World, keep: bool = False) -> Executable:
        self._keep_own(world)
        return super()._captured(entry, world, keep)

    def _keep_own(self, world: World) -> None:
        """Put this rank's parts in the place of global arguments, once per call."""
        if self._cut is not world:
            self._cut = world
            for position, layout in self._entry.own.items():
                world.values[position] = self.ranks.part(world.values[position], layout)

    # -- together ------------------------------------------------------------------------

    def _agree(self, vote: int) -> bool:
        least, largest = self.ranks.extremes(vote)
        if least == FAILED:
            self._raise_with_others(None)
        return least == largest and vote >= 0

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, OtherRankError) or self._ranks is None:
            return
        self.ranks.extremes(FAILED)
        self.ranks.everyone(f"{type(error).__name__}: {error}")

    def _raise_with_others(self, mine: str | None) -> None:
        """Raise what another rank failed with."""
        told = self.ranks.everyone(mine)
        rank, text = next((i, t) for i, t in enumerate(told) if t is not None)
        raise OtherRankError(
            f"Rank {rank} of the mesh stopped in this step, so rank "
            f"{self.ranks.device_mesh.get_rank()} stops too. It said: {text}"
        )

    def _is_common(self, program: Program) -> bool:
        """Under DDP's definition sizes and branches may be one rank's own."""
        return not self._is_mean or not _depends_on_data(program)

    def _refuse_different(self, executable: Executable) -> None:
        lines = [
            f"{node.target} {node.args[1:-1]} over {node.meta.get('axis')!r}"
            for node in executable.graph.graph.nodes
            if getattr(node.target, "namespace", None) == "_c10d_functional"
        ]
        mark = zlib.crc32("\n".join(lines).encode())
        if not self._agree(mark):
            self.ranks.same_everywhere([(f"collective {i}", x) for i, x in enumerate(lines)])

    def _common_stream(self) -> AbstractContextManager[None]:
        own = self._is_mean or self.options.mode.rng == "local"
        return nullcontext() if own else self.ranks.common_stream()

    # -- what CompiledStep asks for --------------------------------------------------------

    def _fetch(self, world: World, position: int) -> Tensor:
        value = world.values[position]
        if position in self._entry.parts:
            return self.ranks.whole(value.detach(), self._entry.parts[position])
        return self.ranks.fetch(value)

    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        return self.ranks.bind(graph)

    def _read(self, position: int, spec: Any, value: Any, layout: Layout) -> Any:
        if not isinstance(value, Tensor):
            return tensor_of(value)
        if spec.kind == "argument":
            return self._argument(position, value.detach(), layout)
        if spec.kind != "captured":
            self._layouts[spec.kind, spec.name] = layout
        return self.ranks.read(value, layout)

    def _argument(self, position: int, value: Tensor, layout: Layout) -> Tensor:
        have = self._entry.parts.get(position)
        if have is None:
            return self.ranks.part(value, layout)
        return value if have == layout else self.ranks.part(self.ranks.whole(value, have), layout)

    def _inputs(self, executable: Executable, world: World) -> list[Any]:
        self._adopt(executable, world)
        return super()._inputs(executable, world)

    def _adopt(self, executable: Executable, world: World) -> None:
        """Turn plain parameters and their state into DTensors, once, before anything runs."""
        fresh: dict[int, nn.Parameter] = {}
        for position, spec in enumerate(world.specs):
            value, layout = world.values[position], executable.inputs[position]
            if not isinstance(value, Tensor) or self.ranks.global_shape(value) is not None:
                continue
            if spec.kind == "parameter":
                fresh[id(value)] = self.ranks.adopted(value, layout)
                world.values[position] = fresh[id(value)]
            elif spec.kind == "state" and value.dim():
                local = self.ranks.part(value.detach(), layout).clone()
                world.values[position] = self.ranks.held(local, layout, tuple(value.shape))
        if fresh:
            replace_parameters(world, fresh)
        self._adopt_states(executable, world)

    def _adopt_states(self, executable: Executable, world: World) -> None:
        """Put adopted state where the optimizer looks for it; take the adopted gradients."""
        parameters = {s.name: s for s in world.specs if s.kind == "parameter"}
        for position, (spec, value) in enumerate(zip(world.specs, world.values, strict=True)):
            if spec.kind == "gradient":
                world.values[position] = self._parameter(world, spec.name).grad
            owner = owner_of(spec.name, parameters) if spec.kind == "state" else None
            if owner is not None and world.optimizer is not None:
                path = spec.name.removeprefix(f"{owner}.")
                set_state(world.optimizer.state[self._parameter(world, owner)], path, value)

    def _execute(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        with self._common_stream() if _draws(graph) else nullcontext():
            outputs = graph(*inputs)
        held = {
            t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor) and t.numel()
        }
        return [
            v.clone()
            if isinstance(v, Tensor) and v.numel() and v.untyped_storage().data_ptr() in held
            else v
            for v in outputs
        ]

    def _walk(self, graph: fx.GraphModule, inputs: list[Any], visit: Visit) -> None:
        walk_rank(graph, inputs, visit)

    def _coordinates(self) -> list[tuple[int, ...]]:
        return [self.ranks.coordinate]

    # -- after the step --------------------------------------------------------------------

    def _store(self, kind: str, name: str, held: Any, value: Any, layout: Layout) -> None:
        world = self._world
        assert world is not None
        if kind != "captured":
            self._layouts[kind, name] = layout
        if kind == "gradient":
            self._store_gradient(world, name, value, layout)
        elif isinstance(held, Tensor) and self.ranks.write(held, value, layout):
            return
        elif kind == "state":
            self._store_state(world, name, value, layout)
        else:
            set_module_tensor(world.model, name, self.ranks.whole(value, layout))

    def _store_argument(self, position: int | None, held: Any, value: Any, layout: Layout) -> None:
        have = self._entry.parts.get(position) if position is not None else None
        if have != layout:
            value = self.ranks.whole(value, layout)
            value = value if have is None else self.ranks.part(value, have)
        held.copy_(value)

    def _parameter(self, world: World, name: str) -> nn.Parameter:
        return self._held(world, "parameter", name)

    def _store_gradient(self, world: World, name: str, value: Tensor, layout: Layout) -> None:
        parameter = self._parameter(world, name)
        if parameter.grad is None or not self.ranks.write(parameter.grad, value, layout):
            parameter.grad = self.ranks.held(value.clone(), layout, tuple(parameter.shape))

    def _store_state(self, world: World, name: str, value: Any, layout: Layout) -> None:
        parameters = {s.name: s for s in world.specs if s.kind == "parameter"}
        owner = owner_of(name, parameters)
        assert owner is not None
        assert world.optimizer is not None
        parameter = self._parameter(world, owner)
        if isinstance(value, Tensor) and value.dim():
            sharded = not layout.is_replicated
            shape = tuple(parameter.shape) if sharded else tuple(value.shape)
            value = self.ranks.held(value.clone(), layout, shape)
        path = name.removeprefix(f"{owner}.")
        set_state(world.optimizer.state[parameter], path, value)

    def _clear_gradient(self, name: str) -> None:
        assert self._world is not None
        self._parameter(self._world, name).grad = None
        self._layouts.pop(("gradient", name), None)

    def _locals(self, value: Any) -> list[Any]:
        return [value]


def _draws(graph: fx.GraphModule) -> bool:
    """Whether the graph draws random numbers."""
    if "draws" not in graph.meta:
        graph.meta["draws"] = any(
            torch.Tag.nondeterministic_seeded in node.target.tags
            for node in graph.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
    return bool(graph.meta["draws"])


def _depends_on_data(program: Program) -> bool:
    """Whether a size or branch the program is specialised on comes from one rank's own data.

    Parameters, their state and finished gradients are the same on every rank; arguments,
    buffers and random numbers are not.
    """
    signature: Signature = program.graph.meta["signature"]
    finished = set(signature.gradients.values())
    kinds = iter(signature.inputs)
    own: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            is_own = next(kinds).kind in ("argument", "buffer", "captured")
        else:
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            inputs = any(n in own for n in node.all_input_nodes)
            is_own = (draws or inputs) and node.name not in finished
            if inputs and (node.target is check_value or node.target in SIZED):
                return True
        if is_own:
            own.add(node)
    return False
