"""Hand what the graph computed back to the module, the optimizer and the caller."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.lifting import Lifted, path_name


def set_module_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Register `value` as buffer or attribute `name` (dotted) of the module."""
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if key in owner._buffers:
        owner._buffers[key] = value
    else:
        setattr(owner, key, value)


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
