"""Run a local graph for all ranks of a mesh in this process, node by node.

Collectives work on lists with one tensor per rank, in gloo's summation order, so the
numbers are bitwise those of real gloo processes. A value that is the same object on every
rank is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from spmd.emit import coordinate_name
from spmd.mesh import MeshShape

_funcol = torch.ops._c10d_functional


class PerRank(list[Any]):
    """One value per rank, in rank order."""


def run_lockstep(
    graph: fx.GraphModule,
    inputs: list[Any],
    mesh: MeshShape,
    visit: Callable[[fx.Node, list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """Run `graph` on every rank of `mesh`.

    Args:
        graph: Local graph after passes.
        inputs: One per placeholder: a `PerRank` of local tensors, or one value that is
            the same on every rank.
        mesh: Axis names and sizes.
        visit: Called with every node and its value on each rank; returns the values to
            go on with.

    Returns:
        The graph's outputs, each a `PerRank` or one value shared by all ranks.
    """
    return _Walk(graph, mesh, visit).run(inputs)


class _Walk:
    def __init__(self, graph: fx.GraphModule, mesh: MeshShape, visit: Any) -> None:
        self.graph, self.mesh, self.visit = graph, mesh, visit
        self.coordinates = mesh.coordinates()
        self.env: dict[fx.Node, Any] = {}
        self.axis = {coordinate_name(name): i for i, name in enumerate(mesh.names)}

    def run(self, inputs: list[Any]) -> list[Any]:
        last_use = _last_uses(self.graph.graph)
        remaining = iter(inputs)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(remaining)
            elif node.op == "output":
                return [self._lookup(leaf) for leaf in node.args[0]]
            elif node.op == "get_attr":
                self.env[node] = self._attribute(str(node.target))
            else:
                self.env[node] = self._call(node)
            if self.visit is not None:
                self._visited(node)
            for dead in last_use.get(node, ()):
                del self.env[dead]
        raise AssertionError("graph without output")

    def _visited(self, node: fx.Node) -> None:
        value = self.env[node]
        parts = list(value) if isinstance(value, PerRank) else [value] * self.mesh.num_ranks
        visited = self.visit(node, parts)
        if any(a is not b for a, b in zip(visited, parts, strict=True)):
            self.env[node] = PerRank(visited)

    def _attribute(self, name: str) -> Any:
        if name in self.axis:
            return PerRank(c[self.axis[name]] for c in self.coordinates)
        return getattr(self.graph, name)

    def _lookup(self, value: Any) -> Any:
        return self.env[value] if isinstance(value, fx.Node) else value

    def _call(self, node: fx.Node) -> Any:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
            return self._collective(node)
        shared = not any(isinstance(self.env[n], PerRank) for n in node.all_input_nodes)
        if shared:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
            return target(*args, **kwargs)
        results = PerRank()
        before = torch.get_rng_state() if _draws_alike(node) else None
        for rank in range(len(self.coordinates)):
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n, r=rank: _pick(self.env[n], r)
            )
            if before is not None:
                torch.set_rng_state(before)
            results.append(target(*args, **kwargs))
        return results

    def _per_rank(self, leaf: Any) -> list[Any]:
        """Return every rank's value of a node, or of a list of nodes."""
        if isinstance(leaf, (list, tuple)):
            columns = [self._per_rank(item) for item in leaf]
            return [list(row) for row in zip(*columns, strict=True)]
        value = self.env[leaf]
        return value if isinstance(value, PerRank) else [value] * self.mesh.num_ranks

    def _collective(self, node: fx.Node) -> Any:
        name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        if name == "wait_tensor":
            return self.env[node.args[0]]
        inputs = self._per_rank(node.args[0])
        results = PerRank([None] * self.mesh.num_ranks)
        groups = self.mesh.groups_of(str(node.args[-1]))
        for group in groups:
            parts = [inputs[r] for r in group]
            outs = _run_collective(name, parts, node.args)
            for rank, out in zip(group, outs, strict=True):
                results[rank] = out
        if len(groups) == 1 and all(r is results[0] for r in results):
            return results[0]
        return results


def _draws_alike(node: fx.Node) -> bool:
    """Whether every rank draws the same numbers, each from a generator in the same state."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    layout = node.meta.get("layout")
    return layout is None or layout.is_replicated


def _run_collective(name: str, parts: list[Tensor], args: Any) -> list[Tensor]:
    if name == "all_gather_into_tensor":
        return [torch.cat(parts)] * len(parts)
    if name == "all_reduce":
        return [reduced(parts, args[1])] * len(parts)
    if name == "reduce_scatter_tensor":
        return list(reduced(parts, args[1]).chunk(len(parts)))
    if name == "all_to_all_single":
        return _all_to_all(parts, args)
    if name in (
        "all_reduce_coalesced",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    ):
        single = name.removesuffix("_coalesced")
        if single == "all_reduce":
            return _coalesced_all_reduce(parts, args)  # type: ignore[arg-type, return-value]
        columns = [
            _run_collective(single, list(column), args) for column in zip(*parts, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]  # type: ignore[misc]
    raise NotImplementedError(f"collective {name} in lock-step")


def _coalesced_all_reduce(parts: list[list[Tensor]], args: Any) -> list[list[Tensor]]:
    """Reduce the concatenation, as gloo does: an element's order depends on its position."""
    flat = [torch.cat([t.reshape(-1) for t in row]) for row in parts]
    pieces = reduced(flat, args[1]).split([t.numel() for t in parts[0]])
    row = [piece.reshape(t.shape) for piece, t in zip(pieces, parts[0], strict=True)]
    return [row] * len(parts)


def _all_to_all(parts: list[Tensor], args: Any) -> list[Tensor]:
    splits = args[2]
    columns = [list(part.split(splits)) for part in parts]
    return [torch.cat([column[rank] for column in columns]) for rank in range(len(parts))]


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """Reduce over ranks in the order of gloo's ring.

    The flat buffer is cut in chunks; chunk c starts at rank c - 1 and walks down. Each
    partial result is rounded to the dtype. Source: measured bitwise on torch 2.13 with
    2, 3, 4 and 8 ranks, up to 3 million elements.
    """
    count = len(parts)
    combine = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    if count == 1 or op in ("max", "min"):
        total = parts[0]
        for part in parts[1:]:
            total = combine(total, part)
        return total.clone() if count == 1 else total
    flat = torch.stack([p.reshape(-1) for p in parts])
    out = torch.empty_like(flat[0])
    size = max(_chunk_elements(flat.shape[1], out.element_size(), count), 1)
    for index, start in enumerate(range(0, flat.shape[1], size)):
        columns = slice(start, start + size)
        total = flat[(index - 1) % count, columns]
        for step in range(2, count + 1):
            total = flat[(index - step) % count, columns] + total
        out[columns] = total
    if op == "avg":
        out = out / count
    return out.reshape(parts[0].shape)


def _chunk_elements(elements: int, element_bytes: int, ranks: int) -> int:
    bytes_ = math.ceil(elements * element_bytes / (2 * ranks))
    segment = math.ceil(bytes_ / element_bytes) * element_bytes
    if segment == 0:
        return elements
    segments = -(-max(-(-elements * element_bytes // segment), 2 * ranks) // ranks) * ranks
    return segments // ranks * segment // element_bytes


def _pick(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, PerRank) else value


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last.setdefault(node, node)
        for used in node.all_input_nodes:
            last[used] = node
    out: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        out.setdefault(node, []).append(used)
    return out
