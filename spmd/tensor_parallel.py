"""Tensor parallelism: weights live in parts, each rank computes with its own."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import fx

from spmd.dtensor_expand import layout_of
from spmd.errors import UsageError
from spmd.expand import expand
from spmd.layout import Layout, replicated, shard
from spmd.mesh import MeshShape, mesh_shape
from spmd.mode import PassPipelineMode
from spmd.passes import default_passes
from spmd.planning import BatchDims, batch_dims, plan_layouts, split_layout
from spmd.program import Signature, signature_of
from spmd.tensor_plan import COLUMN, ROW, VOCABULARY, Weight, readers_of, weights_of

_KINDS = (COLUMN, ROW, VOCABULARY)
_SHOWN = 4  # parameters in a message


class TensorParallel(PassPipelineMode):
    """Split weights over one axis; on a mesh with another axis, split the batch over that.

    Results do not depend on the plan, only the division of work and what is communicated do.

    Args:
        plan: {parameter or module glob: "column", "row", "vocabulary", `Shard(dim)` or
            `Replicate()`}; the first that matches counts, what none matches is replicated.
            By default derived from the graph, see `spmd.tensor_plan`.
        axis: Axis that splits the weights; `tp` where there is one, else the last.
        input_batch_dim: As of `DataParallel`; used where the mesh has an axis for the batch.
        custom_passes: Replaces the default pass pipeline.
        mesh: `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks.
        rng: `global` draws what one device draws; `local` draws per rank.

    Attributes:
        split: {parameter: what splits it}, of the last captured step.

    Raises:
        UsageError: `tensor-plan` for a plan that names nothing or no kind there is, or where
            there is nothing to split; `tensor-axes` for a mesh of more than two axes or without
            the axis.
    """

    def __init__(
        self,
        plan: dict[str, Any] | None = None,
        *,
        axis: str | None = None,
        input_batch_dim: BatchDims = 0,
        custom_passes: Any = None,
        mesh: Any = None,
        rng: str = "global",
    ) -> None:
        super().__init__(default_passes(), custom_passes)
        for glob, kind in (plan or {}).items():
            if kind not in _KINDS and type(kind).__name__ not in ("Shard", "Replicate"):
                raise UsageError(
                    f"Plan of {glob!r}: got {kind!r}, expected one of {', '.join(_KINDS)}, "
                    "Shard(dim) or Replicate().",
                    "tensor-plan",
                )
        self.plan = plan
        self.axis = axis
        self.input_batch_dim = input_batch_dim
        self.mesh = mesh
        self.rng = rng
        self.split: dict[str, str] = {}

    def argument_splits(
        self, signature: Signature, shapes: list[tuple[int, ...]], num_axes: int
    ) -> dict[str, tuple[int | None, ...]]:
        """Return which dim of each argument each axis splits; see `ParallelMode`."""
        own = self._own_axis(mesh_shape(self.mesh))
        dims = batch_dims(signature, shapes, self.input_batch_dim)
        return {
            name: tuple(None if axis == own else dim for axis in range(num_axes))
            for name, dim in dims.items()
        }

    def partition(
        self, gm: fx.GraphModule, model: Any, optimizer: Any, params_and_buffers: Any,
        named_states: Any, args: Any, kwargs: Any,
    ) -> fx.GraphModule:  # fmt: skip
        """Return the local graph; see `ParallelMode.partition`."""
        mesh = mesh_shape(self.mesh)
        own = self._own_axis(mesh)
        signature = signature_of(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        shapes = [tuple(n.meta["val"].shape) for n in placeholders]
        splits = self.argument_splits(signature, shapes, len(mesh.sizes))
        parameters = {s.name: shapes[i] for i, s in signature.of_kind("parameter")}
        whole = replicated(len(mesh.sizes))
        dims = self._dims(gm, parameters, mesh.sizes[own])

        def parameter(name: str, shape: tuple[int, ...]) -> Layout:
            dim = dims.get(name)
            ranks = mesh.sizes[own]
            return whole if dim is None else whole.replace(own, shard(dim, shape[dim], ranks))

        def argument(name: str, shape: tuple[int, ...]) -> Layout:
            return split_layout(splits[name], shape, mesh)

        plan = plan_layouts(gm, mesh, parameter, argument)
        plan.strict, plan.local_draws = self.strict, self.rng == "local"
        return expand(gm, plan)

    def _own_axis(self, mesh: MeshShape) -> int:
        """Return the axis that splits the weights."""
        named = self.axis if self.axis is not None else "tp" if "tp" in mesh.names else None
        if len(mesh.sizes) > 2 or (named is not None and named not in mesh.names):
            raise UsageError(
                f"The mesh has the axes {', '.join(mesh.names)}; expected {named or 'one'!r} for "
                "the weights, alone or with one other axis for the batch.",
                "tensor-axes",
            )
        return mesh.names.index(named) if named is not None else len(mesh.sizes) - 1

    def _dims(
        self, gm: fx.GraphModule, shapes: dict[str, tuple[int, ...]], num_ranks: int
    ) -> dict[str, int]:
        """Return {parameter: dim that is split} and remember it in `split`."""
        weights = weights_of(gm)
        dims: dict[str, int] = {}
        self.split = {}
        kinds = _given(self.plan, weights, shapes) if self.plan is not None else _derived(weights)
        fitting = {n: (text, dim) for n, (text, dim) in kinds.items() if dim < len(shapes[n])}
        sizes = {name: shapes[name][dim] for name, (_, dim) in fitting.items()}
        # A derived plan leaves no rank without a part, where some weight is large enough.
        least = 0 if self.plan is not None else num_ranks if _has(sizes, num_ranks) else 2
        for name, (text, dim) in fitting.items():
            if sizes[name] >= least:
                dims[name], self.split[name] = dim % len(shapes[name]), text
        if not dims and self.plan is None:
            raise UsageError(_nothing(gm, shapes, sizes), "tensor-plan")
        return dims


def _nothing(gm: fx.GraphModule, shapes: dict[str, tuple[int, ...]], sizes: dict[str, int]) -> str:
    """Say what forward does with the parameters instead of what could be divided.

    Running such a step with copies everywhere would call equal what nothing was divided of.
    """
    if sizes:
        why = "the weights of matrix products and lookups in forward have one row or column to give"
        shown = {name: f"{size} along its dim" for name, size in sizes.items()}
    else:
        why = "no matrix product and no lookup in forward has a parameter for a factor or a table"
        shown = {name: f"read by {operator}" for name, operator in readers_of(gm).items()}
    first = [
        f"{name} {list(shape)} {shown.get(name, 'not read')}" for name, shape in shapes.items()
    ]
    listed = ", ".join(first[:_SHOWN]) + (", ..." if len(first) > _SHOWN else "")
    return (
        f"Tensor parallelism has nothing to split: {why}. Got {listed}. Use DataParallel, or give "
        f"a plan."
    )


def _has(sizes: dict[str, int], least: int) -> bool:
    return any(size >= least for size in sizes.values())


def _derived(weights: dict[str, Weight]) -> dict[str, tuple[str, int]]:
    """Return {parameter: (kind, dim)}; the bias of a column is split with it."""
    found: dict[str, tuple[str, int]] = {}
    for name, weight in weights.items():
        found[name] = weight.kind, weight.row if weight.kind == ROW else weight.column
        if weight.kind == COLUMN and weight.bias is not None and weight.bias not in weights:
            found[weight.bias] = COLUMN, -1
    return found


def _given(
    plan: dict[str, Any], weights: dict[str, Weight], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[str, int]]:
    """Return {parameter: (kind, dim)} of a user's plan."""
    found: dict[str, tuple[str, int]] = {}
    unused = set(plan)
    for name, shape in shapes.items():
        globs = [g for g in plan if _names(g, name)]
        unused.difference_update(globs)
        if not globs:
            continue
        kind = plan[globs[0]]
        if not isinstance(kind, str):
            layout_of(kind, shape, MeshShape(("tp",), (1,)), name)  # refuses what does not fit
            if hasattr(kind, "dim"):
                found[name] = f"Shard({kind.dim})", kind.dim % len(shape)
            continue
        used = weights.get(name)
        if used is not None:
            found[name] = kind, used.row if kind == ROW else used.column
        elif len(shape) >= 2 or (shape and kind == COLUMN):
            found[name] = kind, 1 if kind == ROW else 0
    if unused:
        raise UsageError(
            f"The plan names no parameter with {sorted(unused)[0]!r}. The step has "
            f"{', '.join(list(shapes)[:8])}. A glob is matched with the parameter's name and with "
            "its module's.",
            "tensor-plan",
        )
    return found


def _names(glob: str, name: str) -> bool:
    module = name.rpartition(".")[0]
    return fnmatch.fnmatchcase(name, glob) or (bool(module) and fnmatch.fnmatchcase(module, glob))
