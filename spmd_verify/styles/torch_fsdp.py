"""The styles `fsdp2` and `hsdp`: torch's fully_shard on every block and on the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import fully_shard

from spmd_verify.case import LoadedCase
from spmd_verify.errors import CaseError, Unsupported
from spmd_verify.styles.base import StyleContext
from spmd_verify.styles.eager import EagerRun, EagerStyle, part_of
from spmd_verify.styles.rehearsal import Rehearsal, rehearse
from spmd_verify.styles.torch_base import TorchRecipe, check_axes
from spmd_verify.user_code import UserCode

_NO_FORWARD: Final = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class FullyShardRecipe(TorchRecipe):
    """Shard the parameters of every block and the rest with the root.

    Attributes:
        blocks: Paths of the modules sharded on their own.
    """

    blocks: tuple[str, ...] = ()

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Shard in place, inner modules first; the optimizer gets the sharded parameters."""
        for path in reversed(self.blocks):
            fully_shard(model.get_submodule(path), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, case.optimizer(model)


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


def blocks_of(case: LoadedCase, model: nn.Module) -> list[str]:
    """Return the paths of the modules to shard on their own, outer ones first.

    What `wrap_policy(model)` names; without it the repeated members of containers. A module
    that shares a parameter with the rest of the model is left to the root.
    """
    policy = case.hooks.wrap_policy
    if policy is not None:
        with UserCode("wrap_policy(model)", path=case.path, slug="hook-raised"):
            asked = list(policy(model) or ())
        return list(_named(case, model, asked))
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return [path for path, module in repeated(model) if _is_closed(module, uses)]


def repeated(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Give the members of ModuleLists, ModuleDicts and Sequentials whose class comes twice.

    Only those with parameters and a forward; a block is not searched for further blocks.
    """
    kinds = Counter(type(child) for child in model.children() if _has_parameters(child))
    is_container = isinstance(model, (*_NO_FORWARD, nn.Sequential))
    for name, child in model.named_children():
        path = f"{prefix}.{name}" if prefix else name
        is_block = is_container and kinds[type(child)] > 1 and not isinstance(child, _NO_FORWARD)
        if is_block and _has_parameters(child):
            yield path, child
        else:
            yield from repeated(child, path)


def _has_parameters(module: nn.Module) -> bool:
    """Say whether a module or one below it has a parameter."""
    return next(module.parameters(), None) is not None


def _is_closed(module: nn.Module, uses: Counter[int]) -> bool:
    """Say whether no module outside uses a parameter of this one."""
    own = Counter(
        id(parameter) for each in module.modules() for parameter in each.parameters(recurse=False)
    )
    return all(uses[key] == count for key, count in own.items())


def _named(case: LoadedCase, model: nn.Module, asked: Iterable[Any]) -> Iterator[str]:
    """Give the paths of what a policy names: modules, classes, or globs of paths."""
    wanted = list(asked)
    for entry in wanted:
        if not isinstance(entry, (nn.Module, type, str)):
            raise CaseError(
                f"wrap_policy(model) names no module: {case.path}. Got {entry!r}. Return modules, "
                f"module classes or paths such as 'layers.*'",
                slug="wrap-policy",
            )
    for path, module in model.named_modules():
        if path and any(_is_named(path, module, entry) for entry in wanted):
            yield path


def _is_named(path: str, module: nn.Module, entry: Any) -> bool:
    """Say whether an entry of a policy means this module."""
    if isinstance(entry, str):
        return fnmatchcase(path, entry)
    return isinstance(module, entry) if isinstance(entry, type) else entry is module


STYLE: Final = FullyShardStyle(FullyShardRecipe("fsdp2"))
HYBRID: Final = FullyShardStyle(FullyShardRecipe("hsdp"), num_axes=2)
