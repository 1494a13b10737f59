"""The blocks of a model: what wrappers are put around one by one, and checkpointing recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from spmd_verify.errors import CaseError
from spmd_verify.user_code import UserCode

if TYPE_CHECKING:
    from spmd_verify.cases.case import LoadedCase

_NO_FORWARD: Final = (nn.ModuleList, nn.ModuleDict)


def blocks_of(case: LoadedCase, model: nn.Module) -> list[str]:
    """Return the paths of the modules to wrap on their own, outer ones first.

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
