"""This process as one rank of a mesh: DTensors in the module, real collectives in the graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from spmd.emit import coordinate_name
from spmd.layout import Layout, Shard, chunk_units
from spmd.lifting import tensor_of
from spmd.mesh import MeshShape, default_mesh, mesh_shape


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def part_of(value: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """Return the part of a global tensor one rank owns; a view where it can be.

    Args:
        value: Global tensor.
        layout: Where its parts lie; not partial.
        coordinate: The rank's index on every axis.
    """
    for placement, index in zip(layout.placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            dim, shape = placement.dim, value.shape
            total, start = sum(placement.units), placement.offsets()[index]
            if placement.outer == 1:
                value = value.narrow(dim, start, placement.units[index])
                continue
            split = value.reshape(*shape[:dim], placement.outer, total, *shape[dim + 1 :])
            part = split.narrow(dim + 1, start, placement.units[index])
            value = part.reshape(*shape[:dim], -1 if part.numel() else 0, *shape[dim + 1 :])
    return value


class ProcessRanks:
    """The rank this process is.

    Args:
        mesh: `DeviceMesh` or None for one axis over all ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self.device_mesh = default_mesh() if mesh is None else mesh
        self.mesh: MeshShape = mesh_shape(self.device_mesh)
        coordinate = self.device_mesh.get_coordinate()
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self.count = 1
        self._checked: set[str] = set()

    # -- values of the world ---------------------------------------------------------

    def global_shape(self, value: Any) -> tuple[int, ...] | None:
        """Return the global shape of a value that is held in parts, else None."""
        return tuple(value.shape) if isinstance(value, DTensor) else None

    def fetch(self, value: Any) -> Any:
        """Return a private copy of the global value; collective where it is in parts."""
        if isinstance(value, DTensor):
            return value.detach().full_tensor().clone()
        if isinstance(value, Tensor):
            return value.detach().clone()
        return tensor_of(value)

    def same_everywhere(self, name: str, value: Tensor) -> None:
        """Bring rank 0's value of an initial parameter or buffer to every rank, in place."""
        if name in self._checked or isinstance(value, DTensor) or dist.get_world_size() == 1:
            return
        self._checked.add(name)
        mine = value.detach().clone()
        group_first = int(self.device_mesh.mesh.flatten()[0])
        with torch.no_grad():
            fresh = value.detach().contiguous()
            dist.broadcast(fresh, group_first)
            different = torch.tensor(int(not torch.equal(mine, fresh)))
            dist.all_reduce(different)
            value.detach().copy_(fresh)
        if int(different):
            warnings.warn(
                f"Ranks started with different values of {name!r}; rank 0's are used on all.",
                stacklevel=2,
            )

    def part(self, value: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a global value."""
        return part_of(value, layout, self.coordinate)

    def held(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Wrap a local part as the module or optimizer holds it: a DTensor if it can be one.

        Args:
            value: Local tensor.
            layout: Where the parts lie.
            shape: Global shape.
        """
        placements: list[Any] = []
        for placement, size in zip(layout.placements, self.mesh.sizes, strict=True):
            if isinstance(placement, Shard):
                if placement.outer != 1 or placement.units != chunk_units(shape[placement.dim], size):
                    return value
                placements.append(TorchShard(placement.dim))
            else:
                placements.append(TorchReplicate())
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value, self.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def adopted(self, parameter: Tensor, layout: Layout) -> nn.Parameter:
        """Return the DTensor parameter that stands for a plain one, its gradient with it."""
        shape = tuple(parameter.shape)
        held = self.held(self.part(parameter.detach(), layout).clone(), layout, shape)
        fresh = nn.Parameter(held, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            fresh.grad = self.held(self.part(parameter.grad, layout).clone(), layout, shape)
        return fresh

    # -- running ------------------------------------------------------------------------

    def bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Give the collectives their process groups and the graph its coordinate."""
        names = {
            axis: self.device_mesh.get_group(i).group_name for i, axis in enumerate(self.mesh.names)
        }
        for node in graph.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
                if node.args[-1] in names:
                    node.args = (*node.args[:-1], names[node.args[-1]])
        for axis, index in zip(self.mesh.names, self.coordinate, strict=True):
            setattr(graph, coordinate_name(axis), index)
        graph.recompile()
        return graph

    def run(self, graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        """Run the local graph on this rank's inputs."""
        return graph(*inputs)

    def locals(self, value: Any) -> list[Any]:
        """Return the local values as a list with one entry per rank of this process."""
        return [value]

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raised `flag`: one one-integer all_reduce."""
        if dist.get_world_size() == 1:
            return flag
        vote = torch.tensor(int(flag), device=self.device_mesh.device_type)
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return bool(vote)

    def gather_sizes(self, sizes: list[int]) -> list[list[int]]:
        """Return every rank's list of sizes, in rank order."""
        mine = torch.tensor(sizes, device=self.device_mesh.device_type)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return [row.tolist() for row in everyone]

    def gather(self, value: Tensor, dim: int, sizes: list[int]) -> Tensor:
        """Return the global tensor whose parts along `dim` the ranks hold."""
        most = max(sizes)
        padded = value.new_zeros([most if d == dim else n for d, n in enumerate(value.shape)])
        padded.narrow(dim, 0, value.shape[dim]).copy_(value)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)

