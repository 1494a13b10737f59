"""Reduce several gradients in one collective."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_funcol = torch.ops._c10d_functional
_COALESCED = {
    _funcol.all_reduce.default: _funcol.all_reduce_coalesced.default,
    _funcol.reduce_scatter_tensor.default: _funcol.reduce_scatter_tensor_coalesced.default,
}


@dataclass(frozen=True)
class BucketGradientReductions:
    """Join the reductions of gradients into coalesced collectives of limited size.

    A coalesced all_reduce sums what the concatenated buffers would: the same values, in
    the ring's order for the longer buffer. Only reductions whose results are read after
    the bucket's last member is ready are joined.

    Attributes:
        bucket_bytes: Largest bucket, in bytes of local input. 25 MiB is DDP's default
            (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb).
    """

    bucket_bytes: int = 25 * 2**20
    name: str = "bucket_gradient_reductions"

    def apply(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the graph with its gradient reductions joined; the caller recompiles it."""
        graph = graph_module.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        buckets: dict[Any, list[fx.Node]] = {}
        closed: list[list[fx.Node]] = []
        for node in graph.nodes:
            if node.target not in _COALESCED or "gradient" not in node.meta:
                continue
            key = (node.target, node.meta["gradient"]["dtype"], node.args[1:])
            bucket = buckets.setdefault(key, [])
            size = sum(n.meta["gradient"]["bytes"] for n in bucket)
            full = size + node.meta["gradient"]["bytes"] > self.bucket_bytes
            if bucket and (full or not _may_wait(bucket, order[node], order)):
                closed.append(bucket)
                buckets[key] = bucket = []
            bucket.append(node)
        for bucket in (*closed, *buckets.values()):
            if len(bucket) > 1:
                _join(graph, bucket)
        return graph_module


def _trimmings(node: fx.Node) -> list[fx.Node]:
    """Return the wait of a reduction and the slices that cut its padding off, in order."""
    chain = list(node.users)
    for current in chain:
        chain += [
            user
            for user in current.users
            if user.target is torch.ops.aten.slice.Tensor
            and user.meta.get("global") == node.meta.get("global")
        ]
    return chain


def _may_wait(bucket: list[fx.Node], position: int, order: dict[fx.Node, int]) -> bool:
    """Whether nobody reads a member's result before `position`."""
    for node in bucket:
        chain = _trimmings(node)
        for current in chain:
            if any(order[user] < position for user in current.users if user not in chain):
                return False
    return True


def _join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    last = bucket[-1]
    target: Any = _COALESCED[last.target]
    with graph.inserting_after(last):
        joined = graph.call_function(target, ([n.args[0] for n in bucket], *last.args[1:]))
    joined.meta |= {k: v for k, v in last.meta.items() if k != "gradient"}
    joined.meta["gradient"] = {
        "dtype": last.meta["gradient"]["dtype"],
        "bytes": sum(n.meta["gradient"]["bytes"] for n in bucket),
        "names": tuple(name for n in bucket for name in n.meta["gradient"]["names"]),
    }
    anchor = joined
    for index, node in enumerate(bucket):
        chain = _trimmings(node)
        wait = chain[0]
        with graph.inserting_after(anchor):
            item = graph.call_function(operator.getitem, (joined, index))
        item.meta |= node.meta
        item.meta.pop("gradient", None)
        wait.args = (item,)
        anchor = item
        for current in chain:
            anchor.append(current)
            anchor = current
    for node in bucket:
        graph.erase_node(node)
