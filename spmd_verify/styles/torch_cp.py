"""The style `cp`: the attention of a step with the sequence over the ranks.

Scaled dot product attention is torch's `context_parallel` where that takes the call, else the
project's ring; attention written by hand is divided product by product. Inputs, positions, masks
and the loss stay whole, so that a model needs to know nothing of it and everything has to be what
one device computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.exact.case import ExactCase
from spmd_verify.styles.attention_calls import Call, answered
from spmd_verify.styles.attention_products import Products, ProductWatch, SplitProducts
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.context_attention import ring, torch_refuses_call, torchs
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.rank_batches import part_of, refuse_split
from spmd_verify.styles.torch_base import TorchRecipe, check_axes

_TORCHS: Final = "torch's context_parallel"
_RING: Final = "the project's ring"


@dataclass(frozen=True)
class ContextRecipe(TorchRecipe):
    """Leave the model alone; answer its attention.

    Attributes:
        is_per_rank: False: everything is whole.
        torch_fails: Why torch's context parallelism does not run here at all, or None.
        products: Of attention written by hand; none where the case calls torch's function.
        tally: Calls answered, by `(what answered, why not torch's)`; filled while it runs.
    """

    name: str = "cp"
    is_per_rank: bool = False
    torch_fails: str | None = None
    products: Products | None = None
    tally: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the model as it is."""
        del mesh
        return model, case.optimizer(model)

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run the case's step on the whole batch."""
        with self.divided(mesh):
            return super().step(case, model, optimizer, batch, mesh)

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Run forward."""
        with self.divided(mesh):
            return super().evaluate(case, model, batch, mesh)

    def divided(self, mesh: Any) -> AbstractContextManager[Any]:
        """Return the context in which attention is divided."""
        if self.products is not None:
            return SplitProducts(self.products, mesh.get_group(0), self.tally)
        return answered(partial(self.answer, mesh))

    def answer(self, mesh: Any, call: Call) -> Tensor:
        """Answer one call; every rank chooses alike, since sizes and flags are the same."""
        group = mesh.get_group(0)
        reason = self.torch_fails or torch_refuses_call(call, group.size())
        self.tally[(_RING, reason) if reason else (_TORCHS, "")] += 1
        return ring(call, group) if reason else torchs(call, group, mesh)

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse inputs that the case itself splits over the axis."""
        refuse_split(self.name, path, size, axis, ranks, divides="the attention")


class ContextRun(EagerRun):
    """A run that says which attention ran."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says of this run."""
        found = dict(super().facts())
        assert isinstance(self.recipe, ContextRecipe), "built below"
        tally = self.recipe.tally
        if self.recipe.products is not None:
            counts = [f"{tally['products', where]} {where}" for where in ("forward", "backward")]
            text = f"written by hand, queries over the ranks in products: {', '.join(counts)}"
        else:
            text = ", ".join(
                f"{what} in {count} calls" + (f" (torch's: {why})" if why else "")
                for (what, why), count in tally.most_common()
            )
        return {**found, "notes": [f"attention: {text}", *found["notes"]]}


@dataclass(frozen=True)
class ContextStyle(EagerStyle):
    """Context parallel attention over the axis `cp`."""

    recipe: ContextRecipe = ContextRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """See once per cell what attention there is and what torch's takes, then build.

        Raises:
            Unsupported: Another mesh; exact mode; no attention.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, 0, ("cp",))
        if isinstance(case, ExactCase):
            raise Unsupported(
                f"{self.name} is not for exact mode: that stands in for torch's attention kernel, "
                f"and {self.name} replaces the kernel. Leave out --exact",
                slug="exact-attention",
            )
        mesh = context.kept("mesh", context.device_mesh)
        part = partial(part_of, self.recipe, case, context)
        found: Attention = context.kept("attention", lambda: find(case, part, context.device))
        if not found.calls and not found.products.by_row:
            raise Unsupported(
                f"{self.name} does not take this case: its training step has no attention. Looked "
                f"for F.scaled_dot_product_attention, and for a product, a softmax over its last "
                f"dim and a product of that. Write attention in one of these ways, or choose "
                f"another style",
                slug="no-attention",
            )
        recipe = replace(
            self.recipe,
            torch_fails=context.kept("torch", lambda: torch_fails(mesh, context.device)),
            products=None if found.calls else found.products,
            tally=Counter(),
        )
        run = ContextRun(recipe, case, context)
        if found.calls and found.products.by_row:
            run.extra_notes.append("attention written by hand beside it stays whole")
        return run


@dataclass(frozen=True)
class Attention:
    """What the steps of a case do on one device.

    Attributes:
        calls: Calls of torch's function.
        products: Of attention written by hand.
    """

    calls: int
    products: Products


def find(case: LoadedCase, part: Callable[[Any], Any], device: torch.device) -> Attention:
    """Run the case's steps on one device and look for attention.

    Args:
        case: The case.
        part: Gives this rank's part of a batch, which is the whole.
        device: Where.
    """
    calls = 0

    def count(call: Call) -> Tensor:
        nonlocal calls
        calls += 1
        watch.is_paused = True
        out = call.plain()
        watch.is_paused = False
        return out

    model, watch = case.build_model().to(device), ProductWatch()
    optimizer = case.optimizer(model)
    for index in range(case.steps):
        batch = part(case.batch(index))
        case.seed_step(index)
        with answered(count), case.factory_mode(), watch.mode(model):
            case.step(model, optimizer, batch)
    return Attention(calls, watch.products())


def torch_fails(mesh: Any, device: torch.device) -> str | None:
    """Return why torch's context parallelism does not run on this device, None where it does.

    Its API is a prototype, whose rules come and go between versions: it is asked with a small
    attention, forward and backward. Collective; what it raises, it raises on all ranks.
    """
    shape = (1, 2, 2 * mesh.size(), 4)
    query, key, value = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(3))
    group: dist.ProcessGroup = mesh.get_group(0)
    try:
        torchs(Call(query, key, value), group, mesh).sum().backward()
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        return f"fails here, {reason[:120]}"
    return None


STYLE: Final = ContextStyle()
