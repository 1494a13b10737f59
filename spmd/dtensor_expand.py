"""Expansion with any placements: every operator follows its inputs."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import fx

from spmd.errors import UsageError
from spmd.expand import expand
from spmd.layout import Layout, Replicate, Shard, replicated, shard
from spmd.mesh import MeshShape, mesh_shape
from spmd.mode import PassPipelineMode
from spmd.passes import default_passes
from spmd.planning import batch_dims, plan_layouts
from spmd.program import signature_of


class DTensorExpandMode(PassPipelineMode):
    """Partition by the placements of inputs and parameters alone.

    Args:
        custom_passes: Replaces the default pass pipeline.
        mesh: `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks.
        input_placements: {argument glob: placement, or one per axis}; arguments not named
            are split on dim 0 over the first axis where they have the batch size there.
        parameter_placements: {parameter glob: placement, or one per axis}; replicated
            where not named. Placements are `Shard(dim)` and `Replicate()` of
            `torch.distributed.tensor`.
        rng: `global` draws what one device draws; `local` draws per rank.
    """

    def __init__(
        self,
        custom_passes: Any = None,
        *,
        mesh: Any = None,
        input_placements: dict[str, Any] | None = None,
        parameter_placements: dict[str, Any] | None = None,
        rng: str = "global",
    ) -> None:
        super().__init__(default_passes(), custom_passes)
        self.mesh = mesh
        self.input_placements = input_placements or {}
        self.parameter_placements = parameter_placements or {}
        self.rng = rng
        self.strict = False

    def partition(
        self, gm: fx.GraphModule, model: Any, optimizer: Any, params_and_buffers: Any,
        named_states: Any, args: Any, kwargs: Any,
    ) -> fx.GraphModule:  # fmt: skip
        """Return the local graph; see `ParallelMode.partition`."""
        mesh = mesh_shape(self.mesh)
        signature = signature_of(gm)
        shapes = [tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")]
        dims = batch_dims(signature, shapes, 0)
        whole = replicated(len(mesh.sizes))

        def argument(name: str, shape: tuple[int, ...]) -> Layout:
            chosen = _match(self.input_placements, name)
            if chosen is not None:
                return layout_of(chosen, shape, mesh, name)
            dim = dims[name]
            return whole if dim is None else whole.replace(0, shard(dim, shape[dim], mesh.sizes[0]))

        def parameter(name: str, shape: tuple[int, ...]) -> Layout:
            chosen = _match(self.parameter_placements, name)
            return whole if chosen is None else layout_of(chosen, shape, mesh, name)

        plan = plan_layouts(gm, mesh, parameter, argument)
        plan.strict, plan.local_draws = self.strict, self.rng == "local"
        return expand(gm, plan)


def _match(placements: dict[str, Any], name: str) -> Any:
    return next((p for glob, p in placements.items() if fnmatch.fnmatchcase(name, glob)), None)


def layout_of(chosen: Any, shape: tuple[int, ...], mesh: MeshShape, name: str) -> Layout:
    """Return the layout for a placement or a list of one per axis.

    Raises:
        UsageError: `placement`, if there is not one per axis, a dim is out of range or
            two axes split the same dim.
    """
    listed = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
    if len(listed) != len(mesh.sizes):
        raise UsageError(
            f"Placements of {name!r}: got {len(listed)} for a mesh with axes {mesh.names}. Give "
            "one per axis.",
            "placement",
        )
    placements: list[Any] = []
    used: set[int] = set()
    for placement, size in zip(listed, mesh.sizes, strict=True):
        if not hasattr(placement, "dim"):
            placements.append(Replicate())
            continue
        dim = placement.dim % len(shape) if -len(shape) <= placement.dim < len(shape) else None
        if dim is None or dim in used:
            raise UsageError(
                f"Placements of {name!r}: {placement} does not fit a tensor of shape "
                f"{list(shape)}{'' if dim is None else ', two axes split one dim'}. Shard an "
                "existing dim, each by one axis.",
                "placement",
            )
        used.add(dim)
        placements.append(placement if isinstance(placement, Shard) else shard(dim, shape[dim], size))
    return Layout(tuple(placements))
