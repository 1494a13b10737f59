"""Data parallelism: the batch is split, parameters are replicated or live in parts."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import fx

from spmd.errors import UnknownStyleError, UsageError
from spmd.expand import expand
from spmd.layout import Layout, replicated
from spmd.mesh import mesh_shape, one_axis
from spmd.mode import PassPipelineMode
from spmd.passes import default_passes
from spmd.planning import BatchDims, batch_dims, plan_layouts, sharded_on
from spmd.program import signature_of


class DataParallelStyle(Enum):
    """Where parameters and optimizer state live between steps."""

    DEFAULT = 0
    REPLICATE = 1
    FULLY_SHARD = 2


class DataParallel(PassPipelineMode):
    """Split the batch over the mesh.

    Args:
        parallel_style: `replicate` (whole parameters, one all_reduce per gradient),
            `fully_shard` (parameters, gradients and state split on dim 0, gathered for
            use) or `default` (splits what divides evenly, replicates the rest).
        input_batch_dim: Dim of the arguments that counts samples, or {argument: dim or
            None}. Results do not depend on it, only the division of work does.
        custom_passes: Replaces the default pass pipeline: passes, or one callable from
            graph to graph.
        mesh: `DeviceMesh`, `{axis: size}`, or None for one axis over all ranks. A mesh of
            several axes is used as one.
        gradient_reduction: `global` is the graph of the global step; `mean` is DDP's
            definition: each rank's own loss, gradients averaged.
        rng: `global` draws what one device draws; `local` draws per rank.
        reshard_after_forward: Free gathered parameters after forward and gather again.

    Raises:
        UnknownStyleError: `unknown-parallel-style`.
        UsageError: `gradient-reduction`.
    """

    def __init__(
        self,
        parallel_style: str = "replicate",
        *,
        input_batch_dim: BatchDims = 0,
        custom_passes: Any = None,
        mesh: Any = None,
        gradient_reduction: str = "global",
        rng: str = "global",
        reshard_after_forward: bool = True,
    ) -> None:
        styles = {style.name.lower(): style for style in DataParallelStyle}
        if parallel_style not in styles:
            raise UnknownStyleError(
                f"Unknown parallel style: {parallel_style!r}. Valid styles: {sorted(styles)}."
            )
        if gradient_reduction not in ("global", "mean"):
            raise UsageError(
                f"gradient_reduction is {gradient_reduction!r}, expected 'global' or 'mean'.",
                "gradient-reduction",
            )
        super().__init__(default_passes(), custom_passes)
        self.parallel_style = styles[parallel_style]
        self.input_batch_dim = input_batch_dim
        self.mesh = mesh
        self.gradient_reduction = gradient_reduction
        self.rng = rng
        self.reshard_after_forward = reshard_after_forward

    @property
    def mesh(self) -> Any:
        """The mesh as one axis."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Any) -> None:
        self._mesh = one_axis(mesh)

    def parameter_layout(self, shape: tuple[int, ...], num_ranks: int) -> Layout:
        """Return where a parameter of a global shape lives."""
        style = self.parallel_style
        even = bool(shape) and shape[0] > 0 and shape[0] % num_ranks == 0
        if style is DataParallelStyle.FULLY_SHARD and shape:
            return sharded_on(0, 1, 0, shape[0], num_ranks)
        if style is DataParallelStyle.DEFAULT and even:
            return sharded_on(0, 1, 0, shape[0], num_ranks)
        return replicated(1)

    def partition(
        self, gm: fx.GraphModule, model: Any, optimizer: Any, params_and_buffers: Any,
        named_states: Any, args: Any, kwargs: Any,
    ) -> fx.GraphModule:  # fmt: skip
        """Return the local graph; see `ParallelMode.partition`."""
        mesh = mesh_shape(self.mesh)
        ranks = mesh.num_ranks
        signature = signature_of(gm)
        shapes = [tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")]
        dims = batch_dims(signature, shapes, self.input_batch_dim)
        own = self.gradient_reduction == "mean"

        def argument(name: str, shape: tuple[int, ...]) -> Layout:
            dim = dims[name]
            return replicated(1) if dim is None or own else sharded_on(0, 1, dim, shape[dim], ranks)

        plan = plan_layouts(
            gm, mesh, lambda _, shape: self.parameter_layout(shape, ranks), argument
        )
        plan.compute = {i: replicated(1) for i, _ in signature.of_kind("parameter")}
        plan.regather = self.reshard_after_forward
        plan.strict, plan.mean, plan.local_draws = self.strict, own, self.rng == "local"
        return expand(gm, plan)
