"""This process as one rank of a mesh: DTensors in the module, real collectives in the graph."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from spmd.emit import coordinate_name
from spmd.errors import UsageError
from spmd.layout import Layout, Shard, chunk_units
from spmd.lifting import tensor_of
from spmd.mesh import JoinedMesh, MeshShape, device_mesh_of, mesh_shape, one_axis
from spmd.passes.waits import WaitForGathersAtOnce


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor, anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def whole_of(value: DTensor) -> Tensor:
    """Return the global tensor; collective over the value's mesh."""
    detached: Any = value.detach()
    whole: Tensor = detached.full_tensor()
    return whole


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
            own = index % len(placement.units)
            total, start = sum(placement.units), placement.offsets()[own]
            if placement.outer == 1:
                value = value.narrow(dim, start, placement.units[own])
                continue
            split = value.reshape(*shape[:dim], placement.outer, total, *shape[dim + 1 :])
            part = split.narrow(dim + 1, start, placement.units[own])
            size = placement.outer * placement.units[own]
            value = part.reshape(*shape[:dim], size, *shape[dim + 1 :])
    return value


def joined(parts: Sequence[Tensor], placement: Shard) -> Tensor:
    """Return the tensor whose parts along one axis, in rank order, are `parts`.

    Parts that repeat are taken from the first ranks.
    """
    dim, outer = placement.dim, placement.outer
    split = []
    for part, units in zip(parts, placement.units, strict=False):
        shape = part.shape
        split.append(part.reshape(*shape[:dim], outer, units, *shape[dim + 1 :]))
    whole = torch.cat(split, dim + 1)
    shape = parts[0].shape
    return whole.reshape(*shape[:dim], placement.size, *shape[dim + 1 :])


def checksum(value: Tensor) -> int:
    """Return a number that equal tensors share, by their bytes."""
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(plain.numpy().tobytes())


class ProcessRanks:
    """The rank this process is.

    Args:
        mesh: `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks.

    Raises:
        UsageError: `no-process-group`, `mesh-size` or `not-on-mesh`.
    """

    def __init__(self, mesh: Any) -> None:
        self.parts: Any = None  # of a joined mesh: the DeviceMesh of its axes
        if isinstance(mesh, JoinedMesh):
            self.parts = device_mesh_of(mesh.parts)
            self.device_mesh = one_axis(self.parts)
            self.mesh: MeshShape = mesh_shape(JoinedMesh(self.parts))
        else:
            self.device_mesh = device_mesh_of(mesh)
            self.mesh = mesh_shape(self.device_mesh)
        coordinate = self.device_mesh.get_coordinate()
        if coordinate is None:
            raise UsageError(
                f"Rank {dist.get_rank()} is not on the mesh {self.device_mesh}. Call the compiled "
                "step on the ranks of its mesh only.",
                "not-on-mesh",
            )
        self.coordinate: tuple[int, ...] = tuple(coordinate)
        self._group: Any = None

    @property
    def group(self) -> Any:
        """The process group of all ranks of the mesh."""
        if self._group is None:
            if self.mesh.num_ranks == dist.get_world_size():
                self._group = dist.group.WORLD
            elif len(self.mesh.sizes) == 1:
                self._group = self.device_mesh.get_group()
            else:
                self._group = self.device_mesh._flatten().get_group()
        return self._group

    # -- values of the world ---------------------------------------------------------

    def global_shape(self, value: Any) -> tuple[int, ...] | None:
        """Return the global shape of a value that is held in parts, else None."""
        return tuple(value.shape) if isinstance(value, DTensor) else None

    def fetch(self, value: Any) -> Any:
        """Return a private copy of the global value; collective where it is in parts."""
        if isinstance(value, DTensor):
            return whole_of(value).clone()
        if isinstance(value, Tensor):
            return value.detach().clone()
        return tensor_of(value)

    def synchronise(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Bring rank 0's values to every rank, in place; warn if any differed.

        Args:
            named: What it is, and a plain tensor; the same list on every rank.

        Raises:
            UsageError: `ranks-differ`, if the ranks hold other names or shapes.
        """
        if self.mesh.num_ranks == 1:
            return
        self.same_everywhere([(n, tuple(t.shape), str(t.dtype)) for n, t in named])
        first = int(self.device_mesh.mesh.flatten()[0])
        different = torch.zeros(len(named) + 1, dtype=torch.int32)
        with torch.no_grad():
            for index, (_, value) in enumerate(named):
                fresh = value.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(fresh, first, group=self.group)
                if checksum(fresh) != checksum(value):
                    different[index] = 1
                    value.detach().copy_(fresh)
        different = different.to(self.device_mesh.device_type)
        dist.all_reduce(different, dist.ReduceOp.MAX, group=self.group)
        names = [name for (name, _), flag in zip(named, different.tolist(), strict=False) if flag]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"The ranks started with different values of {names[0]}{more}; rank 0's are used "
                "on all. Build the model from the same seed on every rank.",
                stacklevel=2,
            )

    def same_everywhere(self, described: list[Any]) -> None:
        """Refuse lists of descriptions that differ between the ranks.

        Args:
            described: Tuples that begin with a name; compared item by item.

        Raises:
            UsageError: `ranks-differ`, naming the first item.
        """
        everyone = self.everyone(described)
        for items in zip(*everyone, strict=False):
            _refuse_different(items)
        longest = max(range(len(everyone)), key=lambda rank: len(everyone[rank]))
        for rank, row in enumerate(everyone):
            if len(row) != len(everyone[longest]):
                extra = everyone[longest][len(row)]
                raise UsageError(
                    f"Rank {longest} has {extra[0]}, rank {rank} has not. Every rank must build "
                    "the same model and optimizer and pass the same arguments.",
                    "ranks-differ",
                )

    def part(self, value: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a global value."""
        return part_of(value, layout, self.coordinate)

    def whole(self, value: Tensor, layout: Layout) -> Tensor:
        """Return the global tensor of which every rank of the mesh holds its part.

        Args:
            value: This rank's part.
            layout: Where the parts lie; not partial.
        """
        for axis in reversed(range(len(self.mesh.sizes))):
            placement = layout.placements[axis]
            if not isinstance(placement, Shard):
                continue
            repeats = self.mesh.sizes[axis] // len(placement.units)
            sizes = placement.local_sizes() * repeats
            dim = placement.dim
            padded = value.new_zeros(
                [max(sizes) if d == dim else n for d, n in enumerate(value.shape)]
            )
            padded.narrow(dim, 0, value.shape[dim]).copy_(value)
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self.device_mesh.get_group(axis))
            value = joined(
                [p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], placement
            )
        return value

    def placements(self, layout: Layout, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Return torch's placements for a layout of a global shape, None if it has none.

        They are of the mesh that `held` uses: on a joined one, of its parts.
        """
        if self.parts is not None:
            return self._placements_on_parts(layout.placements[0], shape)
        found: list[Any] = []
        for placement, size in zip(layout.placements, self.mesh.sizes, strict=True):
            if isinstance(placement, Shard):
                if placement.outer != 1 or placement.units != chunk_units(
                    shape[placement.dim], size
                ):
                    return None
                found.append(TorchShard(placement.dim))
            else:
                found.append(TorchReplicate())
        return tuple(found)

    def _placements_on_parts(self, placement: Any, shape: tuple[int, ...]) -> Any:
        """Return torch's placements on the axes a joined one is made of: repeated parts lie on
        the innermost, parts over all of them have none."""
        whole = (TorchReplicate(),) * self.parts.ndim
        if not isinstance(placement, Shard):
            return whole
        inner = self.parts.shape[-1]
        is_chunked = placement.outer == 1 and placement.units == chunk_units(
            shape[placement.dim], inner
        )
        return (*whole[:-1], TorchShard(placement.dim)) if is_chunked else None

    def held(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Wrap a local part as the module or optimizer holds it: a DTensor if it can be one.

        Args:
            value: Local tensor.
            layout: Where the parts lie.
            shape: Global shape.
        """
        placements = self.placements(layout, shape)
        if placements is None:
            return value
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value,
            self.device_mesh if self.parts is None else self.parts,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    def read(self, value: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part, in `layout`, of a value as the module holds it."""
        if not isinstance(value, DTensor):
            return self.part(value.detach(), layout)
        if self._lies_so(value, layout):
            return value._local_tensor.detach()
        return self.part(whole_of(value), layout)

    def write(self, held: Tensor, value: Tensor, layout: Layout) -> bool:
        """Copy a new local part into a value as it is held; whether the shapes allowed it.

        Args:
            held: A DTensor with any placements, or a plain global tensor.
            value: New local part.
            layout: Where the new parts lie.
        """
        if not isinstance(held, DTensor):
            value = self.whole(value, layout)
        elif not self._lies_so(held, layout):
            whole = self.whole(value, layout)
            if whole.shape != held.shape:
                return False
            value = distribute_tensor(
                whole, held.device_mesh, held.placements, src_data_rank=None
            )._local_tensor
        local = local_of(held)
        if local.shape != value.shape:
            return False
        local.detach().copy_(value)
        return True

    def _lies_so(self, value: DTensor, layout: Layout) -> bool:
        same_mesh = value.device_mesh == (self.device_mesh if self.parts is None else self.parts)
        return same_mesh and value.placements == self.placements(layout, tuple(value.shape))

    def adopted(self, parameter: Tensor, layout: Layout) -> nn.Parameter:
        """Return the DTensor parameter for a plain one, with its gradient, hooks, attributes."""
        shape = tuple(parameter.shape)
        held = self.held(self.part(parameter.detach(), layout).clone(), layout, shape)
        fresh = nn.Parameter(held, requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            fresh.grad = self.held(self.part(parameter.grad, layout).clone(), layout, shape)
        vars(fresh).update(vars(parameter))
        # The same tables, so that the handles of the user's hooks still remove them.
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, table):
                setattr(fresh, table, getattr(parameter, table))
        return fresh

    # -- running ------------------------------------------------------------------------

    def bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Give the collectives their process groups and the graph its coordinate."""
        names = {
            axis: self.device_mesh.get_group(i).group_name for i, axis in enumerate(self.mesh.names)
        }
        for i, (part, _) in enumerate(self.mesh.parts):
            names[part] = self.parts.get_group(i).group_name
        for node in graph.graph.nodes:
            target = node.target
            is_operator = isinstance(target, torch._ops.OpOverload)
            is_collective = is_operator and target.namespace == "_c10d_functional"
            if is_collective and node.args[-1] in names:
                node.meta["axis"] = node.args[-1]
                node.args = (*node.args[:-1], names[node.args[-1]])
        for axis, index in zip(self.mesh.names, self.coordinate, strict=True):
            setattr(graph, coordinate_name(axis), index)
        if self.device_mesh.device_type == "cpu":
            graph = WaitForGathersAtOnce().apply(graph)
        graph.recompile()
        return graph

    def extremes(self, number: int) -> tuple[int, int]:
        """Return the least and the largest of the ranks' numbers: one all_reduce."""
        if self.mesh.num_ranks == 1:
            return number, number
        vote = torch.tensor([number, -number], device=self.device_mesh.device_type)
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group)
        largest, least = vote.tolist()
        return -least, largest

    def everyone(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order."""
        if self.mesh.num_ranks == 1:
            return [value]
        found: list[Any] = [None] * self.mesh.num_ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def common_stream(self) -> Iterator[None]:
        """Draw from rank 0's generator; ranks whose own was another keep their own after."""
        own = torch.get_rng_state()
        if self.mesh.num_ranks > 1:
            state = own.clone().to(self.device_mesh.device_type)
            dist.broadcast(state, int(self.device_mesh.mesh.flatten()[0]), group=self.group)
            torch.set_rng_state(state.cpu())
        is_common = torch.equal(own, torch.get_rng_state())
        try:
            yield
        finally:
            if not is_common:
                torch.set_rng_state(own)


def _refuse_different(items: Sequence[Any]) -> None:
    """Raise unless one item of the ranks' descriptions is the same on all."""
    for rank, item in enumerate(items):
        if item != items[0]:
            raise UsageError(
                f"Rank 0 has {_text(items[0])}, rank {rank} has {_text(item)}. Every rank must "
                "build the same model and optimizer and pass the same arguments.",
                "ranks-differ",
            )


def _text(item: Any) -> str:
    return f"{item[0]} ({', '.join(str(part) for part in item[1:])})"
