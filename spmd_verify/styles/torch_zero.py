"""The style `zero1`: torch's ZeroRedundancyOptimizer beside DistributedDataParallel.

Every rank steps the parameters it owns with the case's own optimizer class and sends them to the
others; it has the optimizer state of its own parameters and of no others.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

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
        Unsupported: `torch-refuses`: its class cannot be built again from its groups and
            defaults with the same options.
    """
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in taken.values())
    # Every group carries its own options: defaults that the constructor does not take, such as
    # AdamW's decoupled_weight_decay, come with the groups.
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    lost = [
        name
        for name, entry in list(taken.items())[1:]
        if name not in optimizer.defaults
        and entry.kind not in (entry.VAR_KEYWORD, entry.VAR_POSITIONAL)
    ]
    if lost or (takes_any and not defaults):
        raise _refused(style, kind, f"{lost[0] if lost else '**kwargs'} is not among its defaults")
    groups = [{**each, "params": list(each["params"])} for each in optimizer.param_groups]
    sharded = ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=group, **defaults)
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


def _refused(style: str, kind: type[Optimizer], why: str) -> Unsupported:
    """Return the refusal of an optimizer class."""
    return Unsupported(
        f"{style} does not take this case: ZeroRedundancyOptimizer builds a {kind.__name__} for "
        f"every rank from its parameter groups and defaults, and {why}. Give its options to "
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
