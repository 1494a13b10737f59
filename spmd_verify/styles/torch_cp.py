"""The style `cp`: every scaled dot product attention of a step with the sequence over the ranks.

Torch's `context_parallel` where it takes the call, else the project's ring. Inputs, positions,
masks and the loss stay whole, so that a model needs to know nothing of it and everything has to
be what one device computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_verify.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.styles.attention_calls import Call, answered
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.context_attention import ring, torch_refuses_call, torchs
from spmd_verify.styles.eager import EagerRun, EagerStyle, part_of
from spmd_verify.styles.torch_base import TorchRecipe, check_axes

_TORCHS: Final = "torch's context_parallel"
_RING: Final = "the project's ring"


@dataclass(frozen=True)
class ContextRecipe(TorchRecipe):
    """Leave the model alone; answer its attention.

    Attributes:
        is_per_rank: False: everything is whole.
        torch_fails: Why torch's context parallelism does not run here at all, or None.
        tally: Calls answered, by `(what answered, why not torch's)`; filled while it runs.
    """

    name: str = "cp"
    is_per_rank: bool = False
    torch_fails: str | None = None
    tally: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the model as it is."""
        del mesh
        return model, case.optimizer(model)

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run the case's step on the whole batch."""
        with answered(partial(self.answer, mesh)):
            return super().step(case, model, optimizer, batch, mesh)

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Run forward."""
        with answered(partial(self.answer, mesh)):
            return super().evaluate(case, model, batch, mesh)

    def answer(self, mesh: Any, call: Call) -> Tensor:
        """Answer one call; every rank chooses alike, since sizes and flags are the same."""
        group = mesh.get_group(0)
        reason = self.torch_fails or torch_refuses_call(call, group.size())
        self.tally[(_RING, reason) if reason else (_TORCHS, "")] += 1
        return ring(call, group) if reason else torchs(call, group, mesh)

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse inputs that the case itself splits over the axis.

        Raises:
            Unsupported: `whole-inputs`.
        """
        raise Unsupported(
            f"The batch is split over the axis: input_sharding() divides {path} with {size} "
            f"entries over {axis} with {ranks} ranks. {self.name} keeps inputs whole and divides "
            f"the attention. Leave {axis} out of input_sharding(), or write "
            f"parallelize_my_{self.name}()",
            slug="whole-inputs",
        )


class ContextRun(EagerRun):
    """A run that says which attention ran."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says of this run."""
        found = dict(super().facts())
        assert isinstance(self.recipe, ContextRecipe), "built below"
        parts = [
            f"{what} in {count} calls" + (f" (torch's: {why})" if why else "")
            for (what, why), count in self.recipe.tally.most_common()
        ]
        return {**found, "notes": [f"attention: {', '.join(parts)}", *found["notes"]]}


@dataclass(frozen=True)
class ContextStyle(EagerStyle):
    """Context parallel attention over the axis `cp`."""

    recipe: ContextRecipe = ContextRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """See once per cell whether there is attention and what torch's takes, then build.

        Raises:
            Unsupported: Another mesh; no attention.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, 0, ("cp",))
        mesh = context.kept("mesh", context.device_mesh)
        part = partial(part_of, self.recipe, case, context)
        if not context.kept("calls", lambda: count_calls(case, part)):
            raise Unsupported(
                f"{self.name} does not take this case: the training step never calls "
                f"F.scaled_dot_product_attention, so there is no attention whose sequence could "
                f"be split. Write attention with it, or choose another style",
                slug="no-attention",
            )
        fails = context.kept("torch", lambda: torch_fails(mesh, context.device))
        return ContextRun(replace(self.recipe, torch_fails=fails, tally=Counter()), case, context)


def count_calls(case: LoadedCase, part: Any) -> int:
    """Return how often the case's steps attend on one device."""
    seen: Counter[str] = Counter()

    def count(call: Call) -> Tensor:
        seen["calls"] += 1
        return call.plain()

    model = case.build_model()
    optimizer = case.optimizer(model)
    for index in range(case.steps):
        batch = part(case.batch(index))
        case.seed_step(index)
        with answered(count), case.factory_mode():
            case.step(model, optimizer, batch)
    return seen["calls"]


def torch_fails(mesh: Any, device: torch.device) -> str | None:
    """Return why torch's context parallelism does not run on this device, None where it does.

    Its API is a prototype, whose rules come and go between versions: it is asked with a small
    attention, forward and backward. Collective; what it raises, it raises on all ranks.
    """
    shape = (1, 2, 2 * mesh.size(), 4)
    parts = [torch.zeros(shape, device=device, requires_grad=True) for _ in range(3)]
    group: dist.ProcessGroup = mesh.get_group(0)
    try:
        torchs(Call(*parts), group, mesh).sum().backward()
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        return f"fails here, {reason[:120]}"
    return None


STYLE: Final = ContextStyle()
