"""Hybrid sharding: parameters in parts over the inner axis, in copies over the outer one."""

from __future__ import annotations

from typing import Any

from spmd.data_parallel import DataParallel
from spmd.errors import UsageError
from spmd.layout import Layout, replicated, shard
from spmd.mesh import JoinedMesh, MeshShape, mesh_shape
from spmd.planning import BatchDims


class HybridShard(DataParallel):
    """Split the batch over both axes of a mesh, parameters and state over the inner one.

    Parameters are gathered for use along the inner axis; a gradient is reduce_scattered along
    it, and what that leaves is all_reduced along the outer one.

    Args:
        input_batch_dim: As of `DataParallel`.
        custom_passes: Replaces the default pass pipeline.
        mesh: `DeviceMesh` or `{axis: size}` with two axes, the outer (copies) first.
        gradient_reduction: As of `DataParallel`.
        rng: As of `DataParallel`.
        reshard_after_forward: Free gathered parameters after forward and gather again.

    Raises:
        UsageError: `hybrid-axes`, for a mesh of another number of axes.
    """

    def __init__(
        self,
        *,
        input_batch_dim: BatchDims = 0,
        custom_passes: Any = None,
        mesh: Any = None,
        gradient_reduction: str = "global",
        rng: str = "global",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__(
            "fully_shard",
            input_batch_dim=input_batch_dim,
            custom_passes=custom_passes,
            mesh=mesh,
            gradient_reduction=gradient_reduction,
            rng=rng,
            reshard_after_forward=reshard_after_forward,
        )

    @property
    def mesh(self) -> Any:
        """The mesh as one axis, its parts kept."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Any) -> None:
        if mesh is None or isinstance(mesh, JoinedMesh) or _is_joined(mesh):
            self._mesh = mesh
            return
        shape = mesh_shape(mesh)
        if len(shape.sizes) != 2:
            raise UsageError(
                f"Hybrid sharding needs a mesh of two axes, the outer one for copies: got "
                f"{dict(zip(shape.names, shape.sizes, strict=True))}. Use "
                "{'replicate': 2, 'shard': 2}, or DataParallel('fully_shard').",
                "hybrid-axes",
            )
        self._mesh = JoinedMesh(mesh)

    def parameter_layout(self, shape: tuple[int, ...], num_ranks: int) -> Layout:
        """Return where a parameter of a global shape lives: in parts that repeat."""
        inner = mesh_shape(self.mesh).parts[-1][1]
        if not shape or inner == 1:
            return replicated(1)
        return Layout((shard(0, shape[0], inner),))


def _is_joined(mesh: Any) -> bool:
    return isinstance(mesh, MeshShape) and bool(mesh.parts)
