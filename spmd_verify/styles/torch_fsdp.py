"""The styles `fsdp2` and `hsdp`: torch's fully_shard on every block and on the root."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from spmd_verify.blocks import blocks_of
from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import Handling
from spmd_verify.errors import Unsupported
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.rank_batches import part_of
from spmd_verify.styles.rehearsal import Rehearsal, rehearse
from spmd_verify.styles.torch_base import TorchRecipe, check_axes


@dataclass(frozen=True)
class FullyShardRecipe(TorchRecipe):
    """Shard the parameters of every block and the rest with the root.

    Attributes:
        blocks: Paths of the modules sharded on their own.
    """

    blocks: tuple[str, ...] = ()

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Shard in place, inner modules first; the optimizer gets the sharded parameters."""
        policy = _policy(case)
        for path in reversed(self.blocks):
            fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, case.optimizer(model)

    @property
    def has_policy(self) -> bool:
        """Say yes: `param_dtype` and `reduce_dtype` are fully_shard's."""
        return True

    def handling(self, model: nn.Module) -> Handling:
        """Return what fully_shard does itself: it casts."""
        return replace(super().handling(model), casts_parameters=True)


def _policy(case: LoadedCase) -> MixedPrecisionPolicy:
    """Return the mixed precision that the case's variants ask for."""
    given = case.variants.param_dtype, case.variants.reduce_dtype
    dtypes = [getattr(torch, name) if name else None for name in given]
    return MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])


@dataclass(frozen=True)
class FullyShardStyle(EagerStyle):
    """fully_shard over one data axis, or sharded over the second and replicated over the first.

    Attributes:
        num_axes: 1 or 2.
    """

    recipe: FullyShardRecipe
    num_axes: int = 1

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Rehearse once per cell, choose the blocks, then shard.

        Raises:
            Unsupported: Another mesh, an uneven batch, gradients that only some ranks have,
                what torch refuses.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, self.num_axes)
        blocks, note = common_blocks(self.recipe, case, context)
        run = EagerRun(replace(self.recipe, blocks=blocks), case, context)
        run.extra_notes += [note] if note else []
        run.extra_facts["blocks"] = list(blocks)
        return run


def common_blocks(
    recipe: TorchRecipe, case: LoadedCase, context: StyleContext
) -> tuple[tuple[str, ...], str]:
    """Rehearse once per cell; return the blocks to shard and what to say of those left out.

    Raises:
        Unsupported: Gradients that only some ranks have.
    """
    part = partial(part_of, recipe, case, context)
    rehearsal = context.kept("rehearsal", lambda: rehearse(case, part, partial(blocks_of, case)))
    _check_gradients(recipe.name, rehearsal)
    found = blocks_of(case, case.build_model())
    blocks = rehearsal.common(found)
    left = [path for path in found if path not in blocks]
    if not left:
        return tuple(blocks), ""
    return tuple(blocks), (
        f"sharded with the root, because the ranks do not all enter them in one order: "
        f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
    )


def _check_gradients(style: str, rehearsal: Rehearsal) -> None:
    """Refuse what would leave the ranks with reductions of different sizes.

    Source: torch 2.13 _fsdp_param_group.post_backward reduces the gradients a rank has.
    """
    uneven = rehearsal.uneven()
    if uneven is None:
        return
    name, step, ranks = uneven
    raise Unsupported(
        f"{style} does not take this case: fully_shard reduces the gradients that a rank "
        f"has, and in step {step} {name} has one on ranks {', '.join(map(str, ranks))} only. "
        f"Let every rank use it, if only with weight 0",
        slug="torch-refuses",
    )


STYLE: Final = FullyShardStyle(FullyShardRecipe("fsdp2"))
HYBRID: Final = FullyShardStyle(FullyShardRecipe("hsdp"), num_axes=2)
