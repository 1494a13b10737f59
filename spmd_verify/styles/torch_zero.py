"""The style `zero1`: torch's ZeroRedundancyOptimizer beside DistributedDataParallel.

Every rank steps the parameters it owns with the case's own optimizer class and sends them to the
others; it has the optimizer state of its own parameters and of no others.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.reference.naming import Names
from spmd_verify.reference.trajectory import optimizers_of
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun
from spmd_verify.styles.torch_ddp import DdpRecipe, DdpStyle


@dataclass(frozen=True)
class ZeroRecipe(DdpRecipe):
    """Wrap the model as `ddp` does and every optimizer of the case in one that shards it."""

    name: str = "zero1"

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the wrapped model and its sharded optimizer, or a list of them."""
        wrapped, optimizer = super().wrap(case, model, mesh)
        names = Names(model)
        sharded = [
            shard(self.name, single, _known(names, model), mesh.get_group(0))
            for single in optimizers_of(optimizer)
        ]
        return wrapped, sharded if isinstance(optimizer, list) else sharded[0]


@dataclass(frozen=True)
class ZeroStyle(DdpStyle):
    """`ddp` with optimizer state by its owner."""

    recipe: ZeroRecipe = ZeroRecipe()

    def build(self, case: LoadedCase, context: StyleContext) -> EagerRun:
        """Build as `ddp` does and say who owns what.

        Raises:
            Unsupported: What `ddp` refuses; an optimizer that cannot be built again.
        """
        run = super().build(case, context)
        for single in run.optimizers():
            assert isinstance(single, ZeroRedundancyOptimizer), "wrap makes nothing else"
            counts: list[Any] = [None] * dist.get_world_size()
            own = sum(len(group["params"]) for group in single.optim.param_groups)
            dist.all_gather_object(counts, own)
            shown = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
            # Read by `repro`, whose script has the class and its defaults only.
            build = vars(single)["_optim_constructor"]
            run.extra_facts["narrowed_optimizer"] = isinstance(build, _Narrowed)
            run.extra_notes.append(
                f"parameters whose {type(single.optim).__name__} state a rank owns: {shown}"
            )
        return run


def shard(
    style: str, optimizer: Optimizer, names: dict[int, str], group: Any
) -> ZeroRedundancyOptimizer:
    """Return the optimizer again, with every parameter owned by one rank.

    Args:
        style: For messages.
        optimizer: Built by the case; has not stepped.
        names: Of the model's parameters, by `id`.
        group: The ranks to shard over.

    Raises:
        Unsupported: `torch-refuses`: what it reads beside its groups and defaults holds
            parameters, and every rank would have all of them.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in taken.values())
    # Every group carries its own options: defaults that the constructor does not take, such as
    # AdamW's decoupled_weight_decay, come with the groups.
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    is_lost = any(
        name not in optimizer.defaults
        and entry.kind not in (entry.VAR_KEYWORD, entry.VAR_POSITIONAL)
        for name, entry in list(taken.items())[1:]
    )
    build: Any = kind
    if is_lost or (takes_any and not defaults):
        _refuse_held(style, optimizer, names)
        build, defaults = _Narrowed(optimizer), {}
    groups = [{**each, "params": list(each["params"])} for each in optimizer.param_groups]
    sharded = ZeroRedundancyOptimizer(
        groups, optimizer_class=build, process_group=group, **defaults
    )
    for at, (own, given) in enumerate(
        zip(sharded.optim.param_groups, optimizer.param_groups, strict=True)
    ):
        changed = [key for key in given if key != "params" and not _same(own.get(key), given[key])]
        if changed:
            shown = next((names[id(p)] for p in given["params"] if id(p) in names), "no parameter")
            raise _refused(
                style,
                kind,
                f"group {at} ({shown}, ...) has {changed[0]} = {own.get(changed[0])!r} then, "
                f"expected {given[changed[0]]!r}",
            )
    # What it would hold itself is nothing: the state is the inner optimizer's.
    sharded.state = sharded.optim.state
    return sharded


@dataclass(frozen=True)
class _Narrowed:
    """Stands for an optimizer's class: what it makes is the optimizer itself over fewer parameters.

    For a class with options that its groups and defaults do not have: the constructor's arguments
    are gone, but what it made of them are attributes.
    """

    optimizer: Optimizer

    def __call__(self, params: Iterable[dict[str, Any]]) -> Optimizer:
        """Return the optimizer with these groups, and with the state of their parameters."""
        made: Optimizer = object.__new__(type(self.optimizer))
        vars(made).update(vars(self.optimizer))
        made.param_groups = list(params)
        own = [each for group in made.param_groups for each in group["params"]]
        state = self.optimizer.state
        made.state = defaultdict(dict, {each: state[each] for each in own if each in state})
        return made


def _refuse_held(style: str, optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse an optimizer that cannot be narrowed.

    Raises:
        Unsupported: `torch-refuses`: an attribute holds parameters, or functions of this instance,
            as a scheduler leaves one.
    """
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        leaves = pytree.tree_leaves(value)
        held = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
        if held is not None:
            raise _refused(style, type(optimizer), f"its attribute {name} holds {held}")
        if name == "step":
            raise _refused(style, type(optimizer), "its step was replaced, as a scheduler does")


def _refused(style: str, kind: type[Optimizer], why: str) -> Unsupported:
    """Return the refusal of an optimizer class."""
    return Unsupported(
        f"{style} does not take this case: ZeroRedundancyOptimizer builds a {kind.__name__} for "
        f"every rank over that rank's parameters, and {why}. Give its options to "
        f"Optimizer.__init__ as defaults, under the names of the constructor",
        slug="torch-refuses",
    )


def _known(names: Names, model: nn.Module) -> dict[int, str]:
    """Return the names of the model's parameters by `id`."""
    return {
        id(tensor): name for name, tensors in names.parameters(model).items() for tensor in tensors
    }


def _same(own: Any, given: Any) -> bool:
    """Say whether an option survived; tensors, such as a learning rate, are the same object."""
    return own is given or (type(own) is type(given) and bool(own == given))


STYLE: Final = ZeroStyle()
