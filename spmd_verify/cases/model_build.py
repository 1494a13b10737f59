"""Build a case's model: constructor arguments, casting, lazy parameters, early refusals."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from spmd_verify import refusals
from spmd_verify.cases.batches import cast_tensor
from spmd_verify.cases.hooks import Case
from spmd_verify.errors import CaseError
from spmd_verify.user_code import UserCode

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def construct(hooks: Case, *, where: str, path: str) -> nn.Module:
    """Call the model class or function with the arguments the case gives.

    Args:
        hooks: The case.
        where: Its address, for messages.
        path: The user's file, for tracebacks.

    Raises:
        CaseError: `constructor-raised`, `missing-constructor-arguments`, `not-a-module`,
            `hook-raised`.
    """
    build = hooks.model
    assert build is not None, "discovery leaves no case without a model"
    args, kwargs = init_arguments(hooks.init_inputs, path)
    missing = _missing_arguments(build, len(args), kwargs)
    if missing:
        name = getattr(build, "__name__", "the model")
        raise refusals.constructor_arguments(where, name, missing)
    with UserCode("The constructor of the model", path=path, slug="constructor-raised"):
        model = build(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise refusals.not_a_module(where, type(model).__name__)
    return model


def init_arguments(given: Any, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return constructor arguments from the shapes `get_init_inputs` is seen in.

    `[]`, a flat list, `[[args], {kwargs}]` and a dict; a single value is one argument.
    """
    if callable(given):
        with UserCode("get_init_inputs()", path=path, slug="hook-raised"):
            given = given()
    if given is None:
        return (), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, (list, tuple)):
        return (given,), {}
    if len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def _missing_arguments(
    build: Callable[..., Any], num_args: int, kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the required parameters that nobody gives, by name."""
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return []
    positional = [name for name, entry in parameters.items() if entry.kind in _POSITIONAL]
    given = {*positional[:num_args], *kwargs}
    required = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, entry in parameters.items()
        if entry.kind in required and entry.default is inspect.Parameter.empty and name not in given
    ]


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating and complex parameters and buffers in place; ties and names stay."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = cast_tensor(tensor.data, dtype)


def is_lazy(tensor: Any) -> bool:
    """Say whether a parameter or buffer has no shape yet."""
    return isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def materialise(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, path: str
) -> None:
    """Give lazy parameters their shapes by one eval forward without gradient."""
    model.eval()
    with (
        UserCode("The first forward of a lazy model", path=path, slug="forward-raised"),
        torch.no_grad(),
    ):
        model(*args, **kwargs)
    model.train()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def dtypes_changed_by_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, path: str
) -> dict[str, torch.dtype]:
    """Return the dtype of every parameter and buffer that an eval forward converts.

    A forward that raises converts nothing here: the reference run reports it.
    """
    before = {name: tensor.dtype for name, tensor in named_tensors(model)}
    model.eval()
    try:
        with (
            UserCode("The forward", path=path, slug="forward-raised"),
            torch.no_grad(),
        ):
            model(*args, **kwargs)
    except CaseError:
        return {}
    after = named_tensors(model)
    return {name: tensor.dtype for name, tensor in after if before.get(name) != tensor.dtype}


def check_model(model: nn.Module, where: str) -> None:
    """Refuse what can be told without running the model.

    Raises:
        CaseError: `sparse-gradient`, `nothing-trainable`.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise refusals.sparse_gradient(where, f"{name}.weight".lstrip("."))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise refusals.nothing_trainable(where)


def forward_parameters(model: nn.Module | type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of forward without `self`."""
    parameters = dict(inspect.signature(model.forward).parameters)
    if isinstance(model, type):
        parameters.pop(next(iter(parameters)), None)
    return parameters


def positional_names(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """Return the names that positional arguments can have, `*args` excluded."""
    return tuple(name for name, entry in parameters.items() if entry.kind in _POSITIONAL)


def misfit(
    parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Say how arguments do not fit what forward takes, and what to do; "" where they do."""
    try:
        inspect.Signature(list(parameters.values())).bind(*args, **kwargs)
    except TypeError as error:
        is_more = len(args) > len(positional_names(parameters))
        remedy = "Labels come from get_targets()" if is_more else "Return what forward takes"
        given = ", ".join([f"{len(args)} in order"] * bool(args) + list(kwargs))
        return (
            f"get_inputs gives {given or 'nothing'}, forward takes ({', '.join(parameters)}): "
            f"{error}. {remedy}"
        )
    return ""


def required_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the positional parameters of a function that have no default."""
    parameters = inspect.signature(function).parameters
    return tuple(
        name
        for name, entry in parameters.items()
        if entry.kind in _POSITIONAL and entry.default is inspect.Parameter.empty
    )
