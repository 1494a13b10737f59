"""`spmd.compile`: a single-device training step, run by every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from spmd.data_parallel import DataParallel
from spmd.errors import UsageError
from spmd.layout import Layout, Shard, chunk_units
from spmd.lifting import World, tensor_of
from spmd.localize import Visit, walk_rank
from spmd.mode import ParallelMode
from spmd.overrides import Override
from spmd.placed import Placed
from spmd.planning import batch_dims, owner_of, sharded_on
from spmd.program import Signature
from spmd.ranks import ProcessRanks, local_of
from spmd.session import CompiledStep, Executable, Options
from spmd.writeback import replace_parameters, set_module_tensor, set_state


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
            makes them. `global`: every rank passes the same global batch.
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


class RankStep(CompiledStep):
    """A compiled step of one rank."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        super().__init__(function, options)
        self._ranks: ProcessRanks | None = None
        self._layouts: dict[tuple[str, str], Layout] = {}
        self._sizes: dict[int, tuple[int, list[int]]] = {}

    @property
    def ranks(self) -> ProcessRanks:
        """This process's place on the mesh."""
        if self._ranks is None:
            self._ranks = ProcessRanks(self.options.mode.mesh)
            if self.options.mode.mesh is None:
                self.options.mode.mesh = self._ranks.device_mesh
        return self._ranks

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
                table = {"parameter": "parameters", "buffer": "buffers",
                         "state": "optimizer_state", "gradient": "gradients"}  # fmt: skip
                found[table[kind]][name] = Placed([local_of(value.detach())], layout)
        return found

    def _held(self, world: World, kind: str, name: str) -> Any:
        parameters = {
            s.name: v for s, v in zip(world.specs, world.values, strict=True) if s.kind == "parameter"
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

    # -- shapes of the global batch ------------------------------------------------------

    def _shapes(self, world: World) -> dict[int, tuple[int, ...]]:
        shapes: dict[int, tuple[int, ...]] = {}
        for position, value in enumerate(world.values):
            shape = self.ranks.global_shape(value)
            if shape is not None:
                shapes[position] = shape
        self._sizes = {}
        if self.options.mode.gradient_reduction == "mean":
            self._keep_own_part(world)
        elif self.options.batch == "local":
            self._exchange_batch(world, shapes)
        return shapes

    def _keep_own_part(self, world: World) -> None:
        """Under DDP's definition the step is that of this rank's part of the batch."""
        if self.options.batch == "local":
            return
        signature = Signature(world.specs)
        shapes = [tuple(getattr(v, "shape", ())) for v in world.values]
        dims = batch_dims(signature, shapes, getattr(self.options.mode, "input_batch_dim", 0))
        ranks = self.ranks.mesh.num_ranks
        for position, spec in signature.of_kind("argument"):
            dim = dims[spec.name]
            if dim is not None:
                layout = sharded_on(0, 1, dim, shapes[position][dim], ranks)
                world.values[position] = self.ranks.part(world.values[position], layout)

    def _exchange_batch(self, world: World, shapes: dict[int, tuple[int, ...]]) -> None:
        """Learn the global batch sizes from all ranks; refuse parts chunk does not make."""
        signature = Signature(world.specs)
        local = [tuple(getattr(v, "shape", ())) for v in world.values]
        wanted = getattr(self.options.mode, "input_batch_dim", 0)
        dims = batch_dims(signature, local, wanted)
        arguments = [(i, s.name) for i, s in signature.of_kind("argument")]
        split = [(i, name, dims[name]) for i, name in arguments if dims[name] is not None]
        if not split:
            return
        everyone = self.ranks.gather_sizes([local[i][d] for i, _, d in split if d is not None])
        for column, (position, name, dim) in enumerate(split):
            assert dim is not None
            sizes = [row[column] for row in everyone]
            expected = list(chunk_units(sum(sizes), len(sizes)))
            if sizes != expected:
                raise UsageError(
                    f"Parts of input {name!r} along dim {dim}: the ranks passed {sizes}, "
                    f"torch.chunk of {sum(sizes)} over {len(sizes)} ranks gives {expected}. Split "
                    "the global batch with torch.chunk, or pass batch='global'.",
                    "batch-parts",
                )
            shape = list(local[position])
            shape[dim] = sum(sizes)
            shapes[position] = tuple(shape)
            self._sizes[position] = (dim, sizes)

    # -- what CompiledStep asks for --------------------------------------------------------

    def _fetch(self, world: World, position: int) -> Tensor:
        value = world.values[position]
        if position in self._sizes:
            dim, sizes = self._sizes[position]
            return self.ranks.gather(value.detach(), dim, sizes)
        return self.ranks.fetch(value)

    def _agree(self, flag: bool) -> bool:
        return self.ranks.agree(flag)

    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        return self.ranks.bind(graph)

    def _read(self, position: int, spec: Any, value: Any, layout: Layout) -> Any:
        ranks = self.ranks
        if not isinstance(value, Tensor):
            return tensor_of(value)
        if spec.kind == "argument":
            return self._argument(position, value, layout)
        if spec.kind == "buffer" and (spec.kind, spec.name) not in self._layouts:
            ranks.same_everywhere(spec.name, value)
        if spec.kind != "captured":
            self._layouts[spec.kind, spec.name] = layout
        if ranks.global_shape(value) is None and not layout.is_replicated:
            return ranks.part(value.detach(), layout)
        return local_of(value.detach())

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
                self.ranks.same_everywhere(spec.name, value)
                fresh[id(value)] = self.ranks.adopted(value, layout)
                world.values[position] = fresh[id(value)]
            elif spec.kind == "state" and value.dim():
                local = self.ranks.part(value.detach(), layout).clone()
                world.values[position] = self.ranks.held(local, layout, tuple(value.shape))
        if fresh:
            replace_parameters(world.model, world.optimizer, fresh)
            self._adopt_states(executable, world)

    def _adopt_states(self, executable: Executable, world: World) -> None:
        parameters = {s.name: s for s in world.specs if s.kind == "parameter"}
        for spec, value in zip(world.specs, world.values, strict=True):
            if spec.kind == "gradient":
                position = world.specs.index(spec)
                world.values[position] = self._parameter(world, spec.name).grad
            owner = owner_of(spec.name, parameters) if spec.kind == "state" else None
            if owner is not None and world.optimizer is not None:
                path = spec.name.removeprefix(f"{owner}.")
                set_state(world.optimizer.state[self._parameter(world, owner)], path, value)

    def _argument(self, position: int, value: Tensor, layout: Layout) -> Tensor:
        value = value.detach()
        if position not in self._sizes:
            return self.ranks.part(value, layout)
        dim, sizes = self._sizes[position]
        if len(sizes) == len(layout.placements[0].units if isinstance(layout.placements[0], Shard) else ()):
            placement = layout.placements[0]
            if isinstance(placement, Shard) and placement.dim == dim and list(placement.units) == sizes:
                return value
        return self.ranks.part(self.ranks.gather(value, dim, sizes), layout)

    def _execute(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        outputs = self.ranks.run(graph, inputs)
        held = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor) and t.numel()}
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

    def _store(self, kind: str, name: str, held: Any, value: Any, layout: Layout) -> None:
        world = self._world
        assert world is not None
        if kind != "captured":
            self._layouts[kind, name] = layout
        local = local_of(held)
        if kind == "gradient":
            self._store_gradient(world, name, value, layout)
        elif isinstance(local, Tensor) and local.shape == value.shape:
            local.detach().copy_(value)
        elif kind == "state":
            self._store_state(world, name, value, layout)
        else:
            set_module_tensor(world.model, name, value)

    def _parameter(self, world: World, name: str) -> nn.Parameter:
        return self._held(world, "parameter", name)

    def _store_gradient(self, world: World, name: str, value: Tensor, layout: Layout) -> None:
        parameter = self._parameter(world, name)
        if parameter.grad is not None and local_of(parameter.grad).shape == value.shape:
            local_of(parameter.grad).copy_(value)
        else:
            parameter.grad = self.ranks.held(value.clone(), layout, tuple(parameter.shape))

    def _store_state(self, world: World, name: str, value: Any, layout: Layout) -> None:
        parameters = {s.name: s for s in world.specs if s.kind == "parameter"}
        owner = owner_of(name, parameters)
        assert owner is not None and world.optimizer is not None
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
