"""What a step returns, taken apart into the graph's outputs and put together again."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import nn
from torch.optim import Optimizer

from spmd.program import Lifted


@dataclass(frozen=True)
class Built:
    """Stands for an object pytree does not know that has tensors in its attributes.

    Attributes:
        prototype: A copy of it without those attributes.
        attributes: Name -> (pytree spec, leaves as in `Program.result_constants`).
    """

    prototype: Any
    attributes: dict[str, tuple[Any, list[Any]]]


def packed(
    result: Any, is_value: Callable[[Any], bool], add: Callable[[str, Any], Lifted], name: str = ""
) -> tuple[Any, list[Any]]:
    """Return (pytree spec, leaves) of a result.

    Args:
        result: Anything a step may return.
        is_value: Tells leaves that the graph computes.
        add: (dotted path, leaf) -> the output that stands for it.
        name: Path of the result itself.

    Returns:
        The spec, and leaves that are `Lifted`, `Built` or what they were.
    """
    flat, spec = pytree.tree_flatten_with_path(result)
    leaves: list[Any] = []
    for path, leaf in flat:
        where = ".".join(part for part in (name, path_name(path)) if part)
        if is_value(leaf):
            leaves.append(add(where, leaf))
        elif _has_attributes(leaf):
            leaves.append(_built(leaf, is_value, add, where))
        else:
            leaves.append(leaf)
    return spec, leaves


def _has_attributes(leaf: Any) -> bool:
    if isinstance(leaf, nn.Module | Optimizer | type) or not hasattr(leaf, "__dict__"):
        return False
    return is_dataclass(leaf) or isinstance(leaf, UserDict) or not callable(leaf)


def _built(leaf: Any, is_value: Any, add: Any, name: str) -> Any:
    attributes: dict[str, tuple[Any, list[Any]]] = {}
    for key, value in vars(leaf).items():
        spec, leaves = packed(value, is_value, add, f"{name}.{key}" if name else key)
        if any(isinstance(part, Lifted | Built) for part in leaves):
            attributes[key] = (spec, leaves)
    if not attributes:
        return leaf
    prototype = copy.copy(leaf)
    for key in attributes:
        vars(prototype)[key] = None
    return Built(prototype, attributes)


def unpacked(spec: Any, leaves: list[Any], outputs: list[Any]) -> Any:
    """Return a result with the graph's outputs in the places the step put them."""
    return pytree.tree_unflatten([_filled(leaf, outputs) for leaf in leaves], spec)


def _filled(leaf: Any, outputs: list[Any]) -> Any:
    if isinstance(leaf, Lifted):
        return outputs[leaf.position]
    if not isinstance(leaf, Built):
        return leaf
    value = copy.copy(leaf.prototype)
    for key, (spec, leaves) in leaf.attributes.items():
        vars(value)[key] = unpacked(spec, leaves, outputs)
    return value


def path_name(path: tuple[Any, ...]) -> str:
    """Return a pytree key path as `a.b.0`."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
