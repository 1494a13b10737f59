"""Hand what the graph computed back to the module, the optimizer and the caller."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.lifting import Lifted, path_name, replace_in


def set_module_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Register `value` as buffer or attribute `name` (dotted) of the module."""
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if key in owner._buffers:
        owner._buffers[key] = value
    else:
        setattr(owner, key, value)


def replace_parameters(
    model: nn.Module, optimizer: Optimizer | None, fresh: dict[int, nn.Parameter]
) -> None:
    """Put other parameters in the place of the module's and the optimizer's.

    A plain parameter cannot become a DTensor in place (their slots differ), so every
    reference that can be found is replaced: registered ones, lists of them in modules
    (recurrent layers keep such), parameter groups and the keys of the state.

    Args:
        model: The module.
        optimizer: Its optimizer, or None.
        fresh: id of the old parameter -> the new one.
    """
    for module in model.modules():
        replace_in(module._parameters, fresh)
        replace_in(vars(module), fresh, skip=("_parameters", "_buffers", "_modules"))
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [fresh.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in fresh]:
            optimizer.state[fresh[id(old)]] = optimizer.state.pop(old)


def set_hyper(optimizer: Optimizer, name: str, value: float) -> None:
    """Set hyper-parameter `<group>.<path>` of the optimizer."""
    index, _, path = name.partition(".")
    group = optimizer.param_groups[int(index)]
    key = path.split(".")[0]
    flat, spec = pytree.tree_flatten_with_path(group[key])
    leaves = [
        value if ".".join(p for p in (key, path_name(where)) if p) == path else leaf
        for where, leaf in flat
    ]
    group[key] = pytree.tree_unflatten(leaves, spec)


def set_state(state: dict[str, Any], path: str, value: Any) -> None:
    """Set entry `path` of one parameter's optimizer state; nested dicts are made."""
    keys = path.split(".")
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = value


def rebuilt(spec: Any, constants: list[Any], outputs: list[Any]) -> Any:
    """Return the step's result with its values in the places the step put them."""
    leaves = [outputs[c.position] if isinstance(c, Lifted) else c for c in constants]
    return pytree.tree_unflatten(leaves, spec)
