"""The style `ddp`: torch's DistributedDataParallel over one data axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spmd_verify.cases.case import LoadedCase
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.rank_batches import part_of
from spmd_verify.styles.rehearsal import rehearse
from spmd_verify.styles.torch_base import TorchRecipe, check_axes


@dataclass(frozen=True)
class DdpRecipe(TorchRecipe):
    """Wrap in DistributedDataParallel.

    Attributes:
        has_unused: Whether some parameter gets no gradient on some rank.
    """

    name: str = "ddp"
    has_unused: bool = False

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the wrapped model; its optimizer sees the names that the model itself has."""
        optimizer = case.optimizer(model)
        wrapped = DistributedDataParallel(
            model, process_group=mesh.get_group(0), find_unused_parameters=self.has_unused
        )
        return wrapped, optimizer


@dataclass(frozen=True)
class DdpStyle(EagerStyle):
    """DistributedDataParallel, told of unused parameters only where there are some.

    With the flag always on it would refuse models that reach a parameter twice.
    """

    recipe: DdpRecipe = DdpRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Rehearse once per cell, then wrap.

        Raises:
            Unsupported: Another mesh, an uneven batch, what torch refuses.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, 1)
        part = partial(part_of, self.recipe, case, context)
        unused = context.kept("rehearsal", lambda: rehearse(case, part)).unused()
        run = EagerRun(replace(self.recipe, has_unused=bool(unused)), case, context)
        run.extra_facts["find_unused_parameters"] = bool(unused)
        if unused:
            shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
            run.extra_notes.append(f"find_unused_parameters: no gradient on some rank for {shown}")
        return run


STYLE: Final = DdpStyle()
