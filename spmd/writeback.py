"""Hand what the graph computed back to the module, the optimizer and the caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.lifting import World, replace_in, roots_of
from spmd.places import mapped, reachable


def set_module_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Register `value` as buffer or attribute `name` (dotted) of the module."""
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if key in owner._buffers:
        owner._buffers[key] = value
    else:
        setattr(owner, key, value)


def replace_parameters(world: World, fresh: dict[int, nn.Parameter]) -> None:
    """Put other parameters in the place of the module's and the optimizer's.

    A plain parameter cannot become a DTensor in place (their slots differ), so every
    reference that can be found is replaced: registered ones, lists of them in modules
    (recurrent layers keep such), parameter groups, the keys of the state, and what else
    the step can reach, such as a list in a variable it closes over. Each old parameter
    remembers its successor, for optimizers and modules that come with a later call.

    Args:
        world: The step's world.
        fresh: id of the old parameter -> the new one.
    """
    for parameter in list(world.model.parameters()):
        if id(parameter) in fresh:
            vars(parameter)[_SUCCESSOR] = fresh[id(parameter)]
    if world.optimizer is not None:
        for parameter in [p for group in world.optimizer.param_groups for p in group["params"]]:
            if id(parameter) in fresh:
                vars(parameter)[_SUCCESSOR] = fresh[id(parameter)]
    for container in reachable(*roots_of(world)):
        for key, value in container.slots().items():
            changed = mapped(value, lambda leaf: fresh.get(id(leaf), leaf))
            if changed is not value:
                container.place(key).set(changed)
    _replace_in(world.model, world.optimizer, fresh)


_SUCCESSOR = "_spmd_successor"


def follow_successors(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Replace parameters that another compiled step turned into DTensors."""
    held = list(model.parameters())
    if optimizer is not None:
        held += [p for group in optimizer.param_groups for p in group["params"]]
    fresh = {id(p): vars(p)[_SUCCESSOR] for p in held if _SUCCESSOR in vars(p)}
    if fresh:
        _replace_in(model, optimizer, fresh)


def _replace_in(
    model: nn.Module, optimizer: Optimizer | None, fresh: dict[int, nn.Parameter]
) -> None:
    for module in model.modules():
        replace_in(module._parameters, fresh)
        replace_in(vars(module), fresh, skip=("_parameters", "_buffers", "_modules"))
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [fresh.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in fresh]:
            optimizer.state[fresh[id(old)]] = optimizer.state.pop(old)


def set_state(state: dict[str, Any], path: str, value: Any) -> None:
    """Set entry `path` of one parameter's optimizer state; nested dicts are made."""
    keys = path.split(".")
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = value
