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
from spmd.program import Signature, signature_of


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

    def argument_splits(
        self, signature: Signature, shapes: list[tuple[int, ...]], num_axes: int
    ) -> dict[str, tuple[int | None, ...]]:
        """Return which dim of each argument each axis splits; see `ParallelMode`."""
        splits = super().argument_splits(signature, shapes, num_axes)
        for position, spec in signature.of_kind("argument"):
            chosen = _match(self.input_placements, spec.name)
            if chosen is not None:
                pairs = _split_dims(chosen, len(shapes[position]), num_axes, spec.name)
                splits[spec.name] = tuple(dim for _, dim in pairs)
        return splits

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
        UsageError: `bad-placement`, if there is not one per axis, a dim is out of range, two
            axes split the same dim or a placement is partial.
    """
    placements: list[Any] = []
    pairs = _split_dims(chosen, len(shape), len(mesh.sizes), name)
    for (placement, dim), size in zip(pairs, mesh.sizes, strict=True):
        if dim is None:
            placements.append(Replicate())
        else:
            given = isinstance(placement, Shard)
            placements.append(placement if given else shard(dim, shape[dim], size))
    return Layout(tuple(placements))


def _split_dims(
    chosen: Any, num_dims: int, num_axes: int, name: str
) -> list[tuple[Any, int | None]]:
    """Return, per axis, the placement and the dim it splits; None where it splits none."""
    listed = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
    if len(listed) != num_axes:
        raise UsageError(
            f"Placements of {name!r}: got {len(listed)} for a mesh with {num_axes} axes. Give one "
            "per axis.",
            "bad-placement",
        )
    found: list[tuple[Any, int | None]] = []
    for placement in listed:
        kind = type(placement).__name__
        if kind not in ("Shard", "Replicate"):
            raise UsageError(
                f"Placements of {name!r}: {placement} cannot be the placement of an input. Use "
                "Shard(dim) or Replicate().",
                "bad-placement",
            )
        if kind == "Replicate":
            found.append((placement, None))
            continue
        fits = -num_dims <= placement.dim < num_dims
        dim = placement.dim % num_dims if fits else None
        if dim is None or dim in {d for _, d in found}:
            why = f"it has {num_dims} dims" if dim is None else "two axes split one dim"
            raise UsageError(
                f"Placements of {name!r}: {placement} does not fit: {why}. Shard an existing dim, "
                "each by one axis.",
                "bad-placement",
            )
        found.append((placement, dim))
    return found
