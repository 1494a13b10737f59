"""The styles `tp`, `sp`, `fsdp2+tp` and `hsdp+tp`: torch's parallelize_module and fully_shard."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import fully_shard

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.rank_batches import part_of
from spmd_verify.styles.torch_base import TorchRecipe, check_axes
from spmd_verify.styles.torch_fsdp import common_blocks
from spmd_verify.styles.tp_derive import Derived, derive
from spmd_verify.styles.tp_plans import Plan, derived_plan, user_plan
from spmd_verify.styles.tp_replicated import plain_is_whole, reduce_partial, replicate_rest


@dataclass(frozen=True)
class TensorParallelRecipe(TorchRecipe):
    """Split weights by a plan, then shard over the data axes what the mesh has of them.

    Attributes:
        axis: The mesh axis that splits weights.
        plan: Found once per cell.
        derived: With it, who uses which parameter.
        blocks: Paths of the modules that fully_shard takes on their own.
    """

    is_per_rank: bool = False
    axis: str = "tp"
    plan: Plan | None = None
    derived: Derived = field(default_factory=lambda: Derived({}, {}))
    blocks: tuple[str, ...] = ()

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Split in place, then shard; the optimizer gets the parameters that come of it."""
        assert self.plan is not None, "build has found it"
        own = mesh[self.axis]
        self.plan.apply(model, own)
        replicate_rest(model, own, self.derived.uses)
        data = tuple(name for name in mesh.mesh_dim_names if name != self.axis)
        if not data:
            reduce_partial(model)  # fully_shard reduces on its own
        else:
            for path in reversed(self.blocks):
                fully_shard(model.get_submodule(path), mesh=mesh[data])
            fully_shard(model, mesh=mesh[data])
        return model, case.optimizer(model)

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run the case's step; plain tensors that meet a DTensor in it are whole on every rank."""
        with plain_is_whole():
            return super().step(case, model, optimizer, batch, mesh)

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Run forward likewise."""
        with plain_is_whole():
            return super().evaluate(case, model, batch, mesh)


@dataclass(frozen=True)
class TensorParallelStyle(EagerStyle):
    """parallelize_module over the last axis, fully_shard over the data axes before it.

    Attributes:
        num_axes: Data axes.
        has_norms: Norms are split along the sequence.
    """

    recipe: TensorParallelRecipe
    num_axes: int = 0
    has_norms: bool = False

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Rehearse once per cell, find the plan, then split.

        Raises:
            Unsupported: Another mesh, nothing that a plan could split, what torch refuses.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, self.num_axes, own=(self.recipe.axis,))
        part = partial(part_of, self.recipe, case, context)
        ranks = context.axes[self.recipe.axis]
        derived = context.kept("plan", lambda: derive(case, part, ranks, self.has_norms))
        plan = self._plan(case, derived)
        nothing: tuple[tuple[str, ...], str] = ((), "")
        has_data = self.num_axes > 0
        blocks, note = common_blocks(self.recipe, case, context) if has_data else nothing
        recipe = replace(self.recipe, plan=plan, derived=derived, blocks=blocks)
        run = EagerRun(recipe, case, context)
        run.extra_notes += [f"plan: {plan.text}", *([note] if note else [])]
        entries = {} if case.hooks.tp_plan is not None else derived.entries
        run.extra_facts |= {
            "blocks": list(blocks),
            "plan": {
                path: [each.how, each.dim, each.is_transposed] for path, each in entries.items()
            },
        }
        return run

    def _plan(self, case: LoadedCase, derived: Derived) -> Plan:
        """Return the file's plan, else the derived one.

        Raises:
            Unsupported: `nothing-to-split`.
        """
        if case.hooks.tp_plan is not None:
            return user_plan(case)
        if derived.entries:
            return derived_plan(derived.entries)
        raise Unsupported(
            f"{self.name} does not take this case: its model has no linear layer and no embedding "
            f"that runs and is as large as the axis {self.recipe.axis}. Give tp_plan(), or use a "
            f"data-parallel style",
            slug="nothing-to-split",
        )


STYLE: Final = TensorParallelStyle(TensorParallelRecipe("tp"))
SEQUENCE: Final = TensorParallelStyle(TensorParallelRecipe("sp", axis="sp"), has_norms=True)
SHARDED: Final = TensorParallelStyle(TensorParallelRecipe("fsdp2+tp", is_per_rank=True), num_axes=1)
HYBRID: Final = TensorParallelStyle(TensorParallelRecipe("hsdp+tp", is_per_rank=True), num_axes=2)
