"""Sequence parallelism: activations live in parts along the sequence, parameters are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from spmd.errors import UsageError
from spmd.expand import expand
from spmd.layout import Layout, replicated, shard
from spmd.mesh import mesh_shape
from spmd.mode import PassPipelineMode
from spmd.passes import default_passes
from spmd.planning import BatchDims, batch_dims, majority, plan_layouts, split_layout
from spmd.program import Signature, signature_of
from spmd.tensor_plan import products_of

aten = torch.ops.aten

# What a product's rows pass through from the activations they are rows of.
_MERGES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
    aten._to_copy.default,
}  # fmt: skip


class SequenceParallel(PassPipelineMode):
    """Split the activations over the last axis along the sequence, the batch over the first.

    What needs the whole sequence (keys and values of attention, a recurrence) gathers it; the
    gradient of a parameter is the sum over the parts.

    Args:
        sequence_dim: Dim of the arguments that counts positions, or {argument: dim or None}.
            By default it is derived: dim 1 of integers [batch, sequence] and of numbers
            [batch, sequence, features], where most of them have the same size there. Where no
            argument has a sequence and none has more than two dims, a row is a position:
            dim 0. Else (images) the first activations [batch, sequence, features] that a
            parameter multiplies are split.
        input_batch_dim: As of `DataParallel`; used where the mesh has an axis for the batch.
        custom_passes: Replaces the default pass pipeline.
        mesh: `DeviceMesh`, `{axis: size}` of one or two axes, or None for one over all ranks.
        rng: `global` draws what one device draws; `local` draws per rank.

    Under `batch="local"` with a derived dim, ranks pass whole arguments.
    """

    def __init__(
        self,
        sequence_dim: BatchDims | None = None,
        *,
        input_batch_dim: BatchDims = 0,
        custom_passes: Any = None,
        mesh: Any = None,
        rng: str = "global",
    ) -> None:
        super().__init__(default_passes(), custom_passes)
        self.sequence_dim = sequence_dim
        self.input_batch_dim = input_batch_dim
        self.mesh = mesh
        self.rng = rng

    def argument_splits(
        self, signature: Signature, shapes: list[tuple[int, ...]], num_axes: int
    ) -> dict[str, tuple[int | None, ...]]:
        """Return which dim of each argument each axis splits; see `ParallelMode`."""
        dims: dict[str, int | None] = {s.name: None for _, s in signature.of_kind("argument")}
        if self.sequence_dim is not None:
            dims = batch_dims(signature, shapes, self.sequence_dim)
        return self._splits(signature, shapes, num_axes, dims)

    def _splits(
        self, signature: Signature, shapes: Any, num_axes: int, dims: dict[str, int | None]
    ) -> dict[str, tuple[int | None, ...]]:
        """Return which dim of each argument each axis splits, given that of the last one."""
        if num_axes == 1:
            return {name: (dim,) for name, dim in dims.items()}
        batch = batch_dims(signature, shapes, self.input_batch_dim)
        return {
            # One dim is split by one axis: a set of rows without a sequence stays whole here.
            name: (batch[name], *(None,) * (num_axes - 2), None if dim == batch[name] else dim)
            for name, dim in dims.items()
        }

    def partition(
        self, gm: fx.GraphModule, model: Any, optimizer: Any, params_and_buffers: Any,
        named_states: Any, args: Any, kwargs: Any,
    ) -> fx.GraphModule:  # fmt: skip
        """Return the local graph; see `ParallelMode.partition`.

        Raises:
            UsageError: `sequence-dim`, where there is nothing to split.
        """
        mesh = mesh_shape(self.mesh)
        whole = replicated(len(mesh.sizes))
        signature = signature_of(gm)
        shapes = [tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")]
        dims, cut = self._dims(gm)
        splits = self._splits(signature, shapes, len(mesh.sizes), dims)

        def argument(name: str, shape: tuple[int, ...]) -> Layout:
            return split_layout(splits[name], shape, mesh)

        plan = plan_layouts(gm, mesh, lambda _name, _shape: whole, argument)
        if cut is not None:
            size = cut.meta["val"].shape[1]
            plan.cuts[cut.name] = len(mesh.sizes) - 1, shard(1, size, mesh.sizes[-1])
        plan.strict, plan.local_draws = self.strict, self.rng == "local"
        return expand(gm, plan)

    def _dims(self, gm: fx.GraphModule) -> tuple[dict[str, int | None], fx.Node | None]:
        """Return the dim of each argument that is split, or the activations that are."""
        signature = signature_of(gm)
        fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        if self.sequence_dim is not None:
            shapes = [tuple(fake.shape) for fake in fakes]
            return batch_dims(signature, shapes, self.sequence_dim), None
        arguments = {s.name: fakes[i] for i, s in signature.of_kind("argument")}
        dims = sequence_dims(arguments)
        if any(dim is not None for dim in dims.values()):
            return dims, None
        cut = _first_activations(gm)
        if cut is None:
            found = ", ".join(f"{n} {list(x.shape)}" for n, x in arguments.items())
            raise UsageError(
                f"Sequence parallelism finds no sequence: the arguments are {found or 'none'}, and "
                "no activations [batch, sequence, features] are multiplied by a parameter. Say "
                "sequence_dim={argument: dim}, or use another mode.",
                "sequence-dim",
            )
        return dims, cut


def sequence_dims(arguments: dict[str, Tensor]) -> dict[str, int | None]:
    """Return {argument: dim that counts positions, or None}; see `SequenceParallel`."""
    with_positions = {
        name: tuple(x.shape)
        for name, x in arguments.items()
        if x.dim() == (3 if x.is_floating_point() or x.is_complex() else 2)
    }
    if with_positions:
        return dict.fromkeys(arguments) | majority(with_positions, 1)
    if any(x.dim() > 2 for x in arguments.values()):
        return dict.fromkeys(arguments)
    return majority({name: tuple(x.shape) for name, x in arguments.items()}, 0)


def _first_activations(gm: fx.GraphModule) -> fx.Node | None:
    """Return the first [batch, sequence, features] whose rows a parameter multiplies."""
    for node in products_of(gm):
        while node.op == "call_function" and node.target in _MERGES:
            if node.meta["val"].dim() == 3:
                break
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
        value = node.meta["val"]
        if node.op == "call_function" and value.dim() == 3 and value.shape[1] > 1:
            return node
    return None
