"""Find a case in a module: hooks by name, explicit cases, and what is missing.

Executes the user's file, so it needs torch; the result is a torch-free `hooks.Case`.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, Final

from torch import nn

from spmd_verify.cases.address import Address
from spmd_verify.cases.hooks import Case, UserStyle
from spmd_verify.errors import CaseError, choices_text
from spmd_verify.style_ids import check_user_styles
from spmd_verify.user_code import UserCode

# Field of `Case` -> name of the hook in a file.
HOOKS: Final[dict[str, str]] = {
    "inputs": "get_inputs",
    "init_inputs": "get_init_inputs",
    "targets": "get_targets",
    "loss": "loss",
    "optimizer": "get_optimizer",
    "step": "step",
    "input_sharding": "input_sharding",
    "tp_plan": "tp_plan",
    "wrap_policy": "wrap_policy",
    "tolerances": "tolerances",
}
STYLE_HOOKS: Final[tuple[str, ...]] = tuple(entry.name for entry in fields(UserStyle))
USER_STYLE: Final = "user"


def discover(module: ModuleType, address: Address) -> Case:
    """Return the case that an address names in an imported module.

    Raises:
        CaseError: `no-such-case`, `several-cases`, `no-such-attribute`, `no-module`,
            `several-modules`, `style-name-taken`.
    """
    explicit = explicit_cases(module, address)
    from_hooks = _case_from_hooks(module, address)
    if address.case is not None:
        if address.case not in explicit:
            raise CaseError(
                f"No such case: {address.text}. Got {address.case!r}; "
                f"{choices_text(address.case, explicit)}. Name one of the file's cases",
                slug="no-such-case",
            )
        case = explicit[address.case].filled_from(from_hooks)
    elif explicit and address.attribute is None:
        if len(explicit) > 1:
            names = ", ".join(f"{address.source}::{name}" for name in explicit)
            raise CaseError(
                f"Several cases in one file: {address.source}. Name one: {names}",
                slug="several-cases",
            )
        case = next(iter(explicit.values())).filled_from(from_hooks)
    else:
        case = from_hooks
    if case.model is None:
        model, origin = _find_model(module, address)
        case = replace(case, model=model, origin={"model": origin, **case.origin})
    check_user_styles(list(case.styles), address.source)
    return case


def explicit_cases(module: ModuleType, address: Address) -> dict[str, Case]:
    """Return the file's `CASE`, `CASES` and `cases()` by name."""
    found: list[Case] = []
    if isinstance(single := getattr(module, "CASE", None), Case):
        found.append(single)
    found.extend(_cases_in(getattr(module, "CASES", None)))
    if callable(function := getattr(module, "cases", None)):
        with UserCode("cases()", path=address.source, slug="hook-raised"):
            found.extend(_cases_in(function()))
    return {case.name or f"case{index}": case for index, case in enumerate(found)}


def _cases_in(value: Any) -> list[Case]:
    """Take explicit cases from a list, an iterator or a mapping of names."""
    if isinstance(value, dict):
        return [
            replace(case, name=case.name or str(name))
            for name, case in value.items()
            if isinstance(case, Case)
        ]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [case for case in value if isinstance(case, Case)]
    return []


def _case_from_hooks(module: ModuleType, address: Address) -> Case:
    """Collect the hooks of the usual names."""
    found = {
        name: value
        for name, hook in HOOKS.items()
        if callable(value := getattr(module, hook, None))
    }
    origin = {name: _describe(hook, found[name]) for name, hook in HOOKS.items() if name in found}
    model = getattr(module, "get_model", None)
    if callable(model) and address.attribute is None:
        found["model"] = model
        origin["model"] = _describe("get_model", model)
    return Case(styles=user_styles(module), origin=origin, **found)


def user_styles(module: ModuleType) -> dict[str, UserStyle]:
    """Return the styles of a file: `user` for `parallelize`, NAME for `parallelize_NAME`.

    A style exists where `parallelize`, `parallelize_NAME` or `setup_NAME` takes a model and
    a mesh (imported ones of torch, such as `parallelize_module`, are none); its other hooks are
    found by the same suffix (`_user` for `parallelize`) and may be missing. Order is that of the
    file.
    """
    names: list[str] = []
    for name, value in vars(module).items():
        opener, _, style = name.partition("_")
        is_opener = name == "parallelize" or (opener in ("parallelize", "setup") and style)
        is_torchs = str(getattr(value, "__module__", "")).startswith("torch.")
        if is_opener and callable(value) and not is_torchs and _takes(value, 2):
            names.append(style or USER_STYLE)
    return {name: _user_style(module, name) for name in dict.fromkeys(names)}


def _user_style(module: ModuleType, style: str) -> UserStyle:
    """Collect the hooks of one user style by suffix."""
    found = {
        hook: value
        for hook in STYLE_HOOKS
        if callable(value := getattr(module, f"{hook}_{style}", None))
    }
    if style == USER_STYLE and callable(value := getattr(module, "parallelize", None)):
        found["parallelize"] = value
    return UserStyle(**found)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Say whether a function can be called with `count` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _find_model(module: ModuleType, address: Address) -> tuple[Callable[..., Any], str]:
    """Return the module class, or the function after `:`, with where it was found."""
    if address.attribute is not None:
        value = getattr(module, address.attribute, None)
        if isinstance(value, nn.Module):
            raise CaseError(
                f"The address names a module that is built already: {address.text}. A case is "
                f"built several times from its seed. Name its class or a function that "
                f"returns it",
                slug="no-such-attribute",
            )
        if not callable(value):
            names = [name for name in vars(module) if not name.startswith("_")]
            raise CaseError(
                f"No such class or function: {address.attribute!r} in {address.source}; "
                f"{choices_text(address.attribute, names)}",
                slug="no-such-attribute",
            )
        return value, _describe(address.attribute, value)
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and (value.__module__ == module.__name__ or name == "Model")
    }
    if "Model" in classes:
        return classes["Model"], _describe("Model", classes["Model"])
    if len(classes) == 1:
        name, value = next(iter(classes.items()))
        return value, _describe(name, value)
    if classes:
        raise CaseError(
            f"Several module classes, none called Model: {address.source}. Got "
            f"{', '.join(classes)}. Choose one: {address.source}:{list(classes)[-1]}",
            slug="several-modules",
        )
    raise CaseError(
        f"No module class: {address.source}. Expected a class Model(torch.nn.Module), or a "
        f"function get_model() that returns a module. Add one of them",
        slug="no-module",
    )


def _describe(name: str, value: Any) -> str:
    """Say where a hook stands, for `--explain`."""
    target = inspect.unwrap(value) if inspect.isfunction(value) else value
    try:
        line = inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        return name
    kind = "class " if isinstance(value, type) else ""
    return f"{kind}{name}, line {line}"
