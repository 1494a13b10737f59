"""Builds the local graph: nodes, numbers that differ between ranks, and where they came from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

from spmd import runtime
from spmd.layout import Layout, Partial, Replicate, Shard, local_shape
from spmd.mesh import MeshShape

# Operands whose kernels read memory in order, whatever the strides say, or refuse gaps: in
# eager they come straight from forward, here they may be slices. Measured on torch 2.13, CPU,
# by tests/test_strided_kernels.py, which finds those that are missing.
READ_IN_ORDER = {
    torch.ops.aten._ctc_loss.Tensor: (0, 1, 2, 3),
    torch.ops.aten._pdist_backward.default: (1,),
    torch.ops.aten._pdist_forward.default: (0,),
    torch.ops.aten._weight_norm_interface.default: (0, 1),
    torch.ops.aten._weight_norm_interface_backward.default: (0, 1, 2, 3),
    torch.ops.aten.adaptive_max_pool3d_backward.default: (2,),
    torch.ops.aten.fractional_max_pool2d_backward.default: (4,),
    torch.ops.aten.fractional_max_pool3d_backward.default: (4,),
    torch.ops.aten.native_group_norm.default: (0,),
    torch.ops.aten.native_group_norm_backward.default: (0, 1, 2, 3),
    torch.ops.aten.native_layer_norm_backward.default: (3, 4, 5),
}
_FILL = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


class _Shaped(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class Emitter:
    """Appends nodes to a local graph and notes their global node, layout and line.

    Args:
        mesh: Axis names and sizes.
    """

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh = mesh
        self.graph = fx.Graph()
        self._root = torch.nn.Module()
        self._coordinates: dict[int, fx.Node] = {}
        self._picked: dict[tuple[int, tuple[int, ...]], fx.Node] = {}
        self._meta: dict[str, Any] = {}
        self._last_placeholder: fx.Node | None = None

    def enter(self, node: fx.Node) -> None:
        """Attribute the nodes that follow to a global node."""
        custom = node.meta.get("custom", {})
        self._meta = {
            "global": node.name,
            "line": custom.get("line"),
            "region": custom.get("region", "forward"),
        }

    def describe(self, call: Any, inputs: list[Layout], outputs: list[Layout]) -> None:
        """Note the layouts of the operator that is emitted next."""
        self._call, self.inputs, self._outputs = call, inputs, outputs

    def placeholder(self, node: fx.Node, layout: Layout) -> fx.Node:
        """Add a placeholder of the global node's name."""
        local = self.graph.placeholder(node.name)
        fake = node.meta["val"]
        shapes = [local_shape(tuple(fake.shape), layout, c) for c in self.mesh.coordinates()]
        local.meta |= self._meta
        local.meta["local_shapes"] = shapes
        local.meta["layout"] = layout
        local.meta["val"] = torch.empty(shapes[0], dtype=fake.dtype, device="meta")
        self._last_placeholder = local
        return local

    def call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a call."""
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta |= self._meta
        return node

    def operator(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add the described operator; ranks whose part is empty skip its kernel.

        Kernels differ in what they do with empty batches, so none is asked.
        """
        args = list(args)
        for position in READ_IN_ORDER.get(target, ()):
            if args[position] is not None:
                args[position] = self._in_order(args[position], self._call.node.args[position])
        empty = self._empty()
        if empty is None:
            node = self.call(target, args, kwargs)
        else:
            outputs = []
            for fake, layout in zip(self._call.outputs, self._outputs, strict=True):
                if fake is None:
                    outputs.append(None)
                    continue
                fill = next((_FILL[p.op] for p in layout.placements if isinstance(p, Partial)), 0.0)
                outputs.append((self.sizes(tuple(fake.shape), layout), fake.dtype, fill))
            single = isinstance(self._call.node.meta["val"], Tensor)
            node = self.call(
                runtime.unless_empty,
                (empty, target, outputs, single, tuple(args), dict(kwargs)),
                {},
            )
        node.meta["layout"] = self._outputs[0] if self._outputs else None
        return node

    def _in_order(self, local: fx.Node, node: fx.Node) -> fx.Node:
        """Return an operand without gaps, in the memory format it has on one device."""
        form = suggest_memory_format(node.meta["val"])
        return self.call(torch.ops.aten.contiguous.default, (local,), {"memory_format": form})

    def root_of_sum(
        self, norm: fx.Node, order: float, layouts: list[Layout], fake: Tensor
    ) -> fx.Node:
        """Join local p-norms to the norm over all ranks; `layouts[0]` becomes whole in place."""
        from spmd.redistribute import redistribute

        have = layouts[0]
        whole = Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in have.placements))
        value = _Shaped(tuple(fake.shape), fake.dtype)
        powered = norm
        if order not in (1.0, float("inf")):
            powered = self.call(torch.ops.aten.pow.Tensor_Scalar, (norm, order), {})
        joined = redistribute(self, powered, value, have, whole)[-1][1]
        layouts[0] = whole
        if order in (1.0, float("inf")):
            return joined
        return self.call(torch.ops.aten.pow.Tensor_Scalar, (joined, 1.0 / order), {})

    def _empty(self) -> Any:
        """Return a node that is true on ranks that have nothing to compute, None if all have."""
        found = None
        for axis in range(len(self.mesh.sizes)):
            flags = self._empty_ranks(axis)
            if any(flags):
                picked = self.pick(axis, flags)
                found = picked if found is None else self.call(operator.or_, (found, picked), {})
        return found

    def _empty_ranks(self, axis: int) -> tuple[int, ...]:
        """Mark the ranks of an axis with an empty operand and no result of their own.

        A result is the rank's own unless it is empty there or a sum it adds nothing to: of
        joined tensors one may be empty and the other not.
        """
        ranks = range(self.mesh.sizes[axis])
        inputs = [layout.placements[axis] for layout in self.inputs]
        outputs = [layout.placements[axis] for layout in self._outputs]

        def is_empty(placement: Any, rank: int) -> bool:
            if not isinstance(placement, Shard):
                return False
            return placement.units[rank % len(placement.units)] == 0

        return tuple(
            int(
                any(is_empty(p, rank) for p in (*inputs, *outputs))
                and all(is_empty(p, rank) or isinstance(p, Partial) for p in outputs)
            )
            for rank in ranks
        )

    def pick(self, axis: int, values: Sequence[int]) -> Any:
        """Return the number that is `values[i]` on rank i of an axis: an int if all agree.

        Fewer values than ranks repeat.
        """
        values = tuple(values)
        values *= self.mesh.sizes[axis] // max(1, len(values))
        if len(set(values)) == 1:
            return values[0]
        if (axis, values) not in self._picked:
            self._picked[axis, values] = self._prologue(
                "call_function", operator.getitem, (values, self._coordinate(axis))
            )
        return self._picked[axis, values]

    def _coordinate(self, axis: int) -> fx.Node:
        if axis not in self._coordinates:
            name = coordinate_name(self.mesh.names[axis])
            setattr(self._root, name, 0)
            self._coordinates[axis] = self._prologue("get_attr", name, ())
        return self._coordinates[axis]

    def _prologue(self, op: str, target: Any, args: Any) -> fx.Node:
        """Add a node right behind the placeholders, so that every later node may use it."""
        anchor = self._last_placeholder
        assert anchor is not None
        with self.graph.inserting_after(anchor):
            node = self.graph.create_node(op, target, args)
        self._last_placeholder = node
        return node

    def sizes(self, shape: tuple[int, ...], layout: Layout) -> list[Any]:
        """Return the local sizes of a global shape: ints, or nodes where ranks differ."""
        out: list[Any] = list(shape)
        for axis, placement in enumerate(layout.placements):
            if isinstance(placement, Shard):
                out[placement.dim] = self.pick(axis, placement.local_sizes())
        return out

    def output(self, results: list[Any]) -> None:
        """End the graph."""
        self.graph.output(results)

    def finish(self) -> fx.GraphModule:
        """Return the graph module; `coordinate_<axis>` on it is this rank's index."""
        from spmd.functional import is_impure

        self.graph.eliminate_dead_code(is_impure_node=is_impure)
        module = fx.GraphModule(self._root, self.graph, "LocalStep")
        for axis in self.mesh.names:
            setattr(module, coordinate_name(axis), 0)
        module.graph.lint()
        return module


def coordinate_name(axis: str) -> str:
    """Return the attribute of a local graph module that is this rank's index on `axis`."""
    return f"coordinate_{axis}"
