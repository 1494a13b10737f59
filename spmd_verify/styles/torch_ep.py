"""The style `ep`: experts spread over the ranks, tokens sent to them by all-to-all.

Inputs stay whole, so that all ranks take the same branches and experts that see no token on some
rank keep nobody waiting. Each rank holds a part of the tokens of every call, sends them to the
experts' owners and takes the results back; parameters of other ranks' experts are not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.parts import WHOLE, Chunk
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle
from spmd_verify.styles.expert_calls import at_owner
from spmd_verify.styles.expert_lists import ExpertList, ListWatch, StepWatch
from spmd_verify.styles.expert_owners import Owners
from spmd_verify.styles.expert_stacks import NotDivisible
from spmd_verify.styles.rank_batches import part_of, refuse_split
from spmd_verify.styles.stack_swap import StackSwap, candidates
from spmd_verify.styles.torch_base import TorchRecipe, check_axes
from spmd_verify.styles.torch_refusals import torch_refuses

# torch 2.13: what clip_grad_norm_ and get_total_norm call.
_TOTAL_NORM: Final = "_get_total_norm"


@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        lists: Those that are modules.
        stacks: Names of stacked parameters.
        refused: Why other stacked parameters stay whole.
    """

    lists: tuple[ExpertList, ...] = ()
    stacks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertRecipe(TorchRecipe):
    """Take away other ranks' experts and send tokens to their owners.

    Attributes:
        is_per_rank: False: everything is whole.
        experts: What is spread.
    """

    name: str = "ep"
    is_per_rank: bool = False
    experts: Experts = Experts()

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Spread the experts in place; the optimizer gets this rank's."""
        spread(model, self.experts, mesh.get_group(0))
        return model, case.optimizer(model)

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run the case's step on the whole batch, with norms over all ranks' experts."""
        with norms_of_all(model, self.experts, mesh.get_group(0)):
            return super().step(case, model, optimizer, batch, mesh)

    def layout(self, case: LoadedCase, name: str, axes: Mapping[str, int]) -> Any:
        """Return dim 0 over the axis for stacks, whole for everything else."""
        del case, axes
        return (Chunk(0),) if name in self.experts.stacks else (WHOLE,)

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse inputs that the case itself splits over the axis."""
        refuse_split(self.name, path, size, axis, ranks, divides="the experts")


@dataclass(frozen=True)
class ExpertStyle(EagerStyle):
    """Expert parallel over the axis `ep`."""

    recipe: ExpertRecipe = ExpertRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Find the experts once per cell, then spread them.

        Raises:
            Unsupported: Another mesh; no experts.
        """
        self.check_runner(context)
        check_axes(self.name, context.axes, 0, ("ep",))
        mesh = context.kept("mesh", context.device_mesh)
        part = partial(part_of, self.recipe, case, context)
        experts = context.kept(
            "experts", lambda: find_experts(case, part, context.device, mesh.get_group(0))
        )
        if not experts.lists and not experts.stacks:
            reasons = f"; {'; '.join(experts.refused)}" if experts.refused else ""
            raise Unsupported(
                f"{self.name} does not take this case: it has no experts that can be spread"
                f"{reasons}. Looked for equal members of a ModuleList or ModuleDict that a router "
                f"chooses between, and for parameters [experts, ...] that tokens are multiplied "
                f"with expert by expert. Use such a mixture of experts, or choose another style",
                slug="no-experts",
            )
        run = EagerRun(replace(self.recipe, experts=experts), case, context)
        run.extra_notes.extend(notes(experts))
        return run


def notes(experts: Experts) -> Iterator[str]:
    """Say what is spread, and what is not."""
    parts = [f"{len(each.members)} modules of {each.path or 'the model'}" for each in experts.lists]
    parts += [f"the stack {name}" for name in experts.stacks]
    shown = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    yield f"experts: {shown}; inputs whole, tokens by all-to-all"
    if experts.refused:
        yield f"stays whole: {'; '.join(experts.refused)}"


def spread(model: nn.Module, experts: Experts, group: dist.ProcessGroup) -> None:
    """Keep this rank's experts only, in place, and send calls of the others to their owners."""
    for each in experts.lists:
        owners = Owners(len(each.members), group)
        for at, (member, units) in enumerate(zip(each.members, each.units, strict=True)):
            owner = at // owners.per_rank
            for unit in units:
                module = model.get_submodule(unit)
                module.forward = partial(_called, module.forward, owner, group)
            if owner != group.rank():
                _take_away(model.get_submodule(member))
    if experts.stacks:
        StackSwap(model, experts.stacks, group).cut()


def _called(forward: Any, owner: int, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    """Run an expert's forward where the expert is."""
    return at_owner(forward, owner, group, args, kwargs)


def _take_away(member: nn.Module) -> None:
    """Leave an expert without its tensors."""
    for module in member.modules():
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                tensors[name] = None


def find_experts(
    case: LoadedCase, part: Any, device: torch.device, group: dist.ProcessGroup
) -> Experts:
    """Return the experts of a case. Collective.

    Raises:
        Unsupported: `torch-refuses`, where the step with stand-ins raises for another reason.
    """
    model = case.build_model().to(device)
    watch = ListWatch(model)
    step = StepWatch(model, watch)
    _one_step(case, part, model, step)
    lists, refused = watch.found(step)
    inside = tuple(f"{member}." for each in lists for member in each.members)
    stacked = [
        name
        for name in candidates(model)
        if not name.startswith(inside) and step.has_router(len(model.get_parameter(name)))
    ]
    refused += [f"{name} is read outside of forward" for name in stacked if name in step.outside]
    names = [name for name in stacked if name not in step.outside]
    while names:
        model = case.build_model().to(device)
        StackSwap(model, names, group).cut()
        try:
            with torch_refuses("ep", "the step with stand-ins for stacked parameters"):
                _one_step(case, part, model)
        except Unsupported as error:
            if not isinstance(error.__cause__, NotDivisible):
                raise
            names.remove(error.__cause__.name)
            refused.append(str(error.__cause__))
            continue
        break
    return Experts(tuple(lists), tuple(names), tuple(refused))


def _one_step(case: LoadedCase, part: Any, model: nn.Module, mode: Any = None) -> None:
    """Run the first step, in a mode or in none."""
    optimizer = case.optimizer(model)
    batch = part(case.batch(0))
    case.seed_step(0)
    with case.factory_mode(), mode or nullcontext():
        case.step(model, optimizer, batch)


@contextmanager
def norms_of_all(model: nn.Module, experts: Experts, group: dist.ProcessGroup) -> Iterator[None]:
    """Make norms for clipping those of all parameters: other ranks' experts count too.

    torch computes them in one function, whose name the clipping functions look up.
    """
    inside = tuple(f"{member}." for each in experts.lists for member in each.members)
    own = [
        parameter
        for name, parameter in model.named_parameters()
        if name in experts.stacks or name.startswith(inside)
    ]
    plain = getattr(clip_grad, _TOTAL_NORM)

    def total(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        ids = {id(parameter.grad) for parameter in own}
        ours = [each for each in given if id(each) in ids]
        common = [each for each in given if id(each) not in ids]
        norms = [plain(each, norm_type, *args, **kwargs) for each in (ours, common)]
        # A rank without experts has a norm of nothing, in torch's default dtype.
        summand, rest = (norm.to(torch.float64) for norm in norms)
        if float(norm_type) == float("inf"):
            dist.all_reduce(summand, dist.ReduceOp.MAX, group=group)
            found = torch.maximum(summand, rest)
        else:
            summand = summand**norm_type
            dist.all_reduce(summand, group=group)
            found = (summand + rest**norm_type) ** (1 / norm_type)
        return found.to(given[0].dtype if given else norms[1].dtype)

    setattr(clip_grad, _TOTAL_NORM, total)
    try:
        yield
    finally:
        setattr(clip_grad, _TOTAL_NORM, plain)


STYLE: Final = ExpertStyle()
